"""A small suite after Highway-BP's experiments with recurrent models: cost of a step (Tables 3 and 6) and training.

Fagnou et al., "Accelerated training through iterative gradient propagation along the residual path", arXiv 2501.17086;
settings: Tables 2 and 5. docs/results/papers.md has the paper's figures beside ours.
"""

from __future__ import annotations

from gradfree.benchmarks.data.bundled import digits
from gradfree.benchmarks.data.text import Text
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import BACKPROP, iterated
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tasks.metrics import digit_accuracy, perplexity
from gradfree.benchmarks.tasks.schedules import AdamTask
from gradfree.benchmarks.tasks.task import Score
from gradfree.benchmarks.timing.recurrent_models import RecurrentNet, recurrent_steps
from gradfree.benchmarks.timing.timed import Timings
from gradfree.benchmarks.training.comparison import Comparison


def _rows(exact: Row, *counts: int) -> tuple[Row, ...]:
    return (exact, *iterated("fixed_point", *counts), *iterated("highway_bp", *counts))


def _language(cell: str, layers: int, width: int, vocabulary: int) -> dict[str, int | str]:
    return {"vocab_size": vocabulary, "cell": cell, "layers": layers, "width": width}


_PIXEL_OPTIONS = {"in_channels": 3, "num_classes": 10, "cell": "gru", "width": 64}
_NETS = (
    *(
        RecurrentNet(label, "recurrent_lm", _language(cell, layers, 128, words), 16, (256,), words)
        for label, cell, layers, words in (("LSTM", "lstm", 1, 210), ("GRU", "gru", 1, 210), ("GRU × 3", "gru", 3, 500))
    ),
    RecurrentNet("GRU, pixels", "pixel_classifier", _PIXEL_OPTIONS, 16, (3, 32, 32), 10),
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


HIGHWAY_BP_TABLE6_SMALL: Suite = (
    Timings(recurrent_steps, _NETS, _rows(Row("backprop", "backprop", {}), 0, 2, 5, 10), threads=2),
    Comparison(_CHARACTERS, _rows(BACKPROP, 0, 1, 2, 5)),
    Comparison(_PIXEL_DIGITS, _rows(BACKPROP, 0, 2, 10)),
)
