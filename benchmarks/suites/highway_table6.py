"""A small suite after Highway-BP's experiments with recurrent models: cost of a step (Tables 3 and 6) and training.

Fagnou et al., "Accelerated training through iterative gradient propagation along the residual path", arXiv 2501.17086;
settings: Tables 2 and 5. The paper shows training results only in plots, so they are claims without numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradfree.benchmarks.data.bundled import digits
from gradfree.benchmarks.data.text import Text
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import BACKPROP, iterated, label_of
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tables.published import Claim, Published, WithPublished
from gradfree.benchmarks.tasks.metrics import digit_accuracy, perplexity
from gradfree.benchmarks.tasks.schedules import AdamTask
from gradfree.benchmarks.tasks.task import Score
from gradfree.benchmarks.timing.recurrent_models import LOOP, RecurrentNet, recurrent_steps, speedup_heading
from gradfree.benchmarks.timing.timed import Timings
from gradfree.benchmarks.training.comparison import Comparison

_K = (0, 2, 5, 10)
_LSTM, _GRU, _STACK, _PIXELS = "LSTM", "GRU", "GRU × 3", "GRU, pixels"
_MILLISECONDS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    _LSTM: {LOOP: (261,), "fixed_point": (81, 99, 128, 173), "highway_bp": (87, 114, 154, 218)},
    _GRU: {LOOP: (209,), "fixed_point": (62, 73, 92, 119), "highway_bp": (66, 88, 118, 166)},
    _STACK: {LOOP: (687,), "fixed_point": (226, 260, 316, 400), "highway_bp": (240, 300, 389, 538)},
    _PIXELS: {LOOP: (715,), "fixed_point": (191, 204, 209, 216), "highway_bp": (205, 210, 230, 248)},
}
"""Table 6: milliseconds of a training step by model and engine, at each k."""


def _rows(exact: Row, *counts: int) -> tuple[Row, ...]:
    return (exact, *iterated("fixed_point", *counts), *iterated("highway_bp", *counts))


def _gains() -> dict[str, dict[str, float]]:
    """Return Table 3 by row and column, computed from Table 6: backpropagation's time over each row's."""
    figures: dict[str, dict[str, float]] = {}
    for net, times in _MILLISECONDS.items():
        (exact,) = times[LOOP]
        for engine, own in times.items():
            for k, time in zip(_K, own, strict=False):
                row = LOOP if engine == LOOP else label_of(engine, k)
                figures.setdefault(row, {})[speedup_heading(net)] = round(exact / time, 2)
    return figures


def _language(cell: str, layers: int, width: int, vocabulary: int) -> dict[str, int | str]:
    return {"vocab_size": vocabulary, "cell": cell, "layers": layers, "width": width}


_PIXEL_OPTIONS = {"in_channels": 3, "num_classes": 10, "cell": "gru", "width": 64}
_NETS = (
    *(
        RecurrentNet(label, "recurrent_lm", _language(cell, layers, 128, words), 16, (256,), words)
        for label, cell, layers, words in ((_LSTM, "lstm", 1, 210), (_GRU, "gru", 1, 210), (_STACK, "gru", 3, 500))
    ),
    RecurrentNet(_PIXELS, "pixel_classifier", _PIXEL_OPTIONS, 16, (3, 32, 32), 10),
)
_SMALL_STEPS = Timings(recurrent_steps, _NETS, _rows(Row("backprop", "backprop", {}), *_K), threads=2)
_SMALL_TABLE = Published(
    source="Highway-BP (arXiv 2501.17086), Tables 6 and 3",
    hardware="one A100, A40 or RTX A6000; the paper does not say which",
    columns=tuple(map(speedup_heading, _MILLISECONDS)),
    figures=_gains(),
    differs=(
        "the paper does not say which implementation of backpropagation it timed; its time is shown in the row "
        f'"{LOOP}", whose time is of similar magnitude',
        "16 examples of 128 units for 128 of 512, and 500 pieces for 16,000; 64 units for pixels as in the paper",
    ),
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
    options={"in_channels": 1, "num_classes": 10, "cell": "gru", "width": 64},
    score=Score("accuracy", "%", digit_accuracy, factor=100.0),
    learning_rate=1e-2,
    batch_size=64,
    steps=300,
)


def _trained(comparison: Comparison, column: str, ascending: Mapping[str, tuple[str, ...]], *differs: str) -> Suite:
    """Return a comparison, and the same beside the paper's claims."""
    published = Published(
        source="Highway-BP (arXiv 2501.17086), section 4, in words (the figures are plots)",
        hardware="one A100, A40 or RTX A6000",
        columns=(column, "cosine"),
        claims=tuple(Claim(says, column, rows) for says, rows in ascending.items()),
        differs=differs,
    )
    return comparison, WithPublished(comparison, published)


def _convergence(*counts: int) -> dict[str, tuple[str, ...]]:
    says = "at equal k Highway-BP does better than fixed-point iteration (k={})"
    return {says.format(k): (label_of("highway_bp", k), label_of("fixed_point", k)) for k in counts}


_FAILS = (
    "on a loss at the end alone fixed-point iteration fails where Highway-BP is as good as backpropagation, at k=10"
)
_SPARSE = {_FAILS: (label_of("fixed_point", 10), label_of("highway_bp", 10))}
_PER_CHARACTER, _ACCURACY = (
    "test perplexity (per character)",
    "test accuracy (%)",
)
_NOT_103 = "WikiText-2 for WikiText-103"

HIGHWAY_BP_TABLE6_SMALL: Suite = (
    _SMALL_STEPS,
    WithPublished(_SMALL_STEPS, _SMALL_TABLE),
    *_trained(
        Comparison(_CHARACTERS, _rows(BACKPROP, 0, 1, 2, 5)),
        _PER_CHARACTER,
        _convergence(0, 1, 2, 5),
        _NOT_103,
        "250 steps of 16 sequences of 128 for 10,000 of 128 of 256, 128 units for 512, learning rate 0.01 for 0.001",
    ),
    *_trained(
        Comparison(_PIXEL_DIGITS, _rows(BACKPROP, 0, 2, 10)),
        _ACCURACY,
        _SPARSE,
        "digits of 64 pixels for CIFAR-10's 1024, 300 steps of 64 for 2,500 of 128, learning rate 0.01 for 0.001",
    ),
)
