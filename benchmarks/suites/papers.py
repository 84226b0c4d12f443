"""Small suites after the experiments of three papers; docs/results/papers.md has the papers' figures beside ours.

- Highway-BP on recurrent models: cost of a step (Tables 3 and 6) and training. Fagnou et al., "Accelerated training
  through iterative gradient propagation along the residual path", arXiv 2501.17086; settings: Tables 2 and 5.
- DSF on text (arXiv 2503.23104), with the settings of the published code: the paper's tables were not available.
- FOTON at depth. "Forward-Only Training of Orthogonal Networks", arXiv 2512.20668, with the settings of the only
  configuration in the published code: the paper's tables were not available.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradfree.benchmarks.data.bundled import digits
from gradfree.benchmarks.data.stored import Images
from gradfree.benchmarks.data.text import Text
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.forward_only import MORE_RATES, ROWS
from gradfree.benchmarks.suites.rows import BACKPROP, DSF, DSF_GATE, TRUNCATED, iterated
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tasks.catalogue import DIGITS
from gradfree.benchmarks.tasks.metrics import perplexity
from gradfree.benchmarks.tasks.task import AdamTask, ConstantSGDTask, Score
from gradfree.benchmarks.timing.nets import RecurrentNet, recurrent_steps
from gradfree.benchmarks.timing.timed import Timings
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.benchmarks.training.depths import DepthSweep


def _rows(exact: Row, *counts: int) -> tuple[Row, ...]:
    return (exact, *iterated("fixed_point", *counts), *iterated("highway_bp", *counts))


def _language(cell: str, layers: int, width: int, vocabulary: int) -> dict[str, Any]:
    return {"vocab_size": vocabulary, "cell": cell, "layers": layers, "width": width}


_PIXEL_OPTIONS = {"in_channels": 3, "num_classes": 10, "cell": "gru", "width": 64}
_NETS = (
    *(
        RecurrentNet("recurrent_lm", _language(cell, layers, 128, words), 16, (256,), words, label)
        for label, cell, layers, words in (("LSTM", "lstm", 1, 210), ("GRU", "gru", 1, 210), ("GRU × 3", "gru", 3, 500))
    ),
    RecurrentNet("pixel_classifier", _PIXEL_OPTIONS, 16, (3, 32, 32), 10, "GRU, pixels"),
)
_CHARACTERS = AdamTask(
    name="highway_char_gru_small",
    data=Text("wikitext-2", unit="character", vocabulary=210, length=128, held_out=300),
    model="recurrent_lm",
    options=_language("gru", 1, 128, 210),
    score=Score("perplexity", "per character", perplexity),
    learning_rate=1e-2,
    batch_size=16,
    steps=250,
)
_PIXEL_DIGITS = AdamTask(
    name="highway_pixels_small",
    data=digits,
    model="pixel_classifier",
    options={**_PIXEL_OPTIONS, "in_channels": 1},
    score=DIGITS.score,
    learning_rate=1e-2,
    batch_size=64,
    steps=300,
)

_ADAM_RATES = (1e-3, 3e-3, 1e-2, 3e-2)

HIGHWAY_BP_TABLE6_SMALL: Suite = (
    Timings(recurrent_steps, _NETS, _rows(Row("backprop", "backprop", {}), 0, 2, 5, 10), threads=2),
    Comparison(_CHARACTERS, _rows(BACKPROP, 0, 1, 2, 5), learning_rates=(*_ADAM_RATES, 1e-1)),
    Comparison(_PIXEL_DIGITS, _rows(BACKPROP, 0, 2, 10), learning_rates=_ADAM_RATES),
)


def _wikitext(layers: int) -> AdamTask:
    return replace(
        _CHARACTERS,
        name=f"dsf_wikitext_gru{layers}_small",
        data=Text("wikitext-2", unit="piece", vocabulary=1000, length=64, held_out=200),
        options={**_language("gru", layers, 64, 1000), "block": "transformer"},
        score=Score("perplexity", "per piece", perplexity),
        learning_rate=1e-3,
        steps=150,
    )


DSF_WIKITEXT_SMALL: Suite = tuple(
    Comparison(_wikitext(layers), (BACKPROP, DSF, DSF_GATE, TRUNCATED), learning_rates=_ADAM_RATES) for layers in (1, 3)
)

_MNIST = ConstantSGDTask(
    name="foton_mnist_small",
    data=Images("mnist", column="image", train=20000, validation=1000),
    model="orthogonal_mlp",
    options={"in_features": 784, "num_classes": 10, "width": 64},
    score=DIGITS.score,
    learning_rate=0.5,
    batch_size=64,
    steps=300,
    momentum=0.0,
)
_RELU = replace(_MNIST, name="foton_mnist_small_relu", options={**_MNIST.options, "activation": "relu"})

FOTON_DEPTH_SMALL: Suite = tuple(
    DepthSweep(task, ROWS, (0.003, *MORE_RATES), depths={depth: {"depth": depth} for depth in depths})
    for task, depths in ((_MNIST, (2, 10, 50)), (_RELU, (2, 10)))
)
