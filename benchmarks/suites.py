"""The comparisons that ``gradfree bench run`` can make."""

from __future__ import annotations

from dataclasses import replace

from gradfree.benchmarks.case import Row
from gradfree.benchmarks.comparison import Comparison
from gradfree.benchmarks.forward_only import FORWARD_ONLY
from gradfree.benchmarks.layers import Layer, LayerTimings
from gradfree.benchmarks.part import Suite
from gradfree.benchmarks.tasks import DIGITS, PYDOC, PYDOC_GRU, TINYSHAKESPEARE, WIKITEXT2

_BACKPROP = (Row("backprop", "backprop", {"plain": True}), Row("backprop via chain", "backprop", {}))


def _highway(*iterations: int) -> tuple[Row, ...]:
    return tuple(Row(f"highway_bp k={k}", "highway_bp", {"iterations": k}) for k in iterations)


_DSF = (Row("dsf linspace", "dsf", {"feedback": "linspace"}), Row("dsf gate", "dsf", {"feedback": "gate"}))
_RECURRENT = (
    *_BACKPROP,
    Row("truncated w=1", "truncated", {"window": 1}),
    *_DSF,
    Row("fixed_point k=1", "fixed_point", {"iterations": 1}),
    *_highway(0, 1, 2),
)
_SIZES = ((1, 4096, 64), (8, 1024, 64), (8, 1024, 256), (32, 256, 256))
_LENGTHS = (64, 256, 4096)
_LAYERS = (
    *(Layer("GRU", *size) for size in _SIZES),
    *(Layer("GRU", 8, steps, 64) for steps in _LENGTHS),
    *(Layer(cell, *size) for cell in ("LSTM", "RNN") for size in (_SIZES[0], _SIZES[2])),
)
_LAYER_ROWS = (
    Row("backprop", "backprop", {}),
    Row("truncated w=1", "truncated", {"window": 1}),
    Row("dsf", "dsf", {}),
    *_highway(0, 2),
)

# γ = 0 throughout. The paper uses 0.2 for pre-LN transformers, but on pydoc's validation data 0 was the better one:
# perplexity 11.7, 10.4, 10.5, 10.8 at k = 0, 1, 2, 4 against 12.0, 10.8, 10.5, 10.9, means of three other seeds.
SUITES: dict[str, Suite] = {
    "quick": (
        Comparison(DIGITS, _BACKPROP + _highway(0, 1, 2, 3, 4, 6)),
        Comparison(PYDOC, _BACKPROP + _highway(0, 1, 2, 4)),
        Comparison(replace(PYDOC_GRU, steps=250), (*_BACKPROP, *_DSF, *_highway(0, 1))),
    ),
    "rnn": (
        LayerTimings(_LAYERS, _LAYER_ROWS, threads=2),
        Comparison(PYDOC_GRU, _RECURRENT),
    ),
    "text": (
        Comparison(TINYSHAKESPEARE, _RECURRENT, learning_rates=(5e-3, 1e-2, 2e-2)),
        Comparison(WIKITEXT2, _RECURRENT, learning_rates=(1e-2, 2e-2, 4e-2)),
    ),
    "forward-only": FORWARD_ONLY,
}
