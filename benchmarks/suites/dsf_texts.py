"""A small suite after DSF's experiments on text (arXiv 2503.23104).

The paper's tables were not available. The settings are those of the published code, and the claims are the order of
methods, partly from secondary sources.
"""

from __future__ import annotations

from gradfree.benchmarks.data.text import Text
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import BACKPROP, DSF, DSF_GATE, TRUNCATED
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tables.published import Claim, Published, WithPublished
from gradfree.benchmarks.tasks.metrics import perplexity
from gradfree.benchmarks.tasks.schedules import AdamTask
from gradfree.benchmarks.tasks.task import Score, Task
from gradfree.benchmarks.training.comparison import Comparison


def _rows(task: Task) -> tuple[Row, ...]:
    """Return the paper's three methods, and feedback from the gate if the cell has one."""
    gate = () if task.options["cell"] == "rnn" else (DSF_GATE,)
    return (BACKPROP, DSF, *gate, TRUNCATED)


def _suite(tasks: tuple[Task, ...], *differs: str, rates: tuple[float, ...] = ()) -> Suite:
    """Return a comparison on each task, each followed by the same beside the paper's claims."""
    comparisons = (Comparison(task, _rows(task), learning_rates=rates) for task in tasks)
    return tuple(part for one in comparisons for part in (one, WithPublished(one, _published(one.task.score, differs))))


def _published(score: Score, differs: tuple[str, ...]) -> Published:
    column = f"test {score.name} ({score.unit})"
    return Published(
        source="DSF (arXiv 2503.23104), in words and partly from secondary sources (its tables were not available)",
        hardware="not available",
        columns=(column, "cosine"),
        claims=(
            Claim("backpropagation through time is at least as good as DSF", column, (BACKPROP.name, DSF.label)),
            Claim("DSF is far better than fully truncated backpropagation", column, (DSF.label, TRUNCATED.label)),
        ),
        differs=("the score at the end of training for the best of 50 validation scores on the way", *differs),
    )


def _wikitext(layers: int) -> AdamTask:
    sizes = {"vocab_size": 1000, "cell": "gru", "layers": layers, "width": 64, "block": "transformer"}
    return AdamTask(
        name=f"dsf_wikitext_gru{layers}_small",
        data=Text("wikitext-2", unit="piece", vocabulary=1000, length=64, held_out=200),
        model="recurrent_lm",
        options=sizes,
        score=Score("perplexity", "per piece", perplexity),
        learning_rate=1e-3,
        batch_size=16,
        steps=150,
    )


DSF_WIKITEXT_SMALL: Suite = _suite(
    (_wikitext(1), _wikitext(3)),
    "WikiText-2 for WikiText-103, 1,000 pieces for 16,000, sequences of 64 for 255, 150 steps of 16 for 19,000 of 128",
    "64 units for 128 to 1024, no LSTM, no RNN",
    "each row at its own learning rate for 0.001",
    rates=(3e-3, 1e-2, 3e-2),
)
