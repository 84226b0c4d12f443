"""A small suite after DSF's experiments on text (arXiv 2503.23104).

The paper's tables were not available. The settings are those of the published code; docs/results/papers.md has what
the paper states beside our figures.
"""

from __future__ import annotations

from gradfree.benchmarks.data.text import Text
from gradfree.benchmarks.suites.rows import BACKPROP, DSF, DSF_GATE, TRUNCATED
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tasks.metrics import perplexity
from gradfree.benchmarks.tasks.schedules import AdamTask
from gradfree.benchmarks.tasks.task import Score
from gradfree.benchmarks.training.comparison import Comparison


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


DSF_WIKITEXT_SMALL: Suite = tuple(
    Comparison(_wikitext(layers), (BACKPROP, DSF, DSF_GATE, TRUNCATED), learning_rates=(3e-3, 1e-2, 3e-2))
    for layers in (1, 3)
)
