"""How much slower what ``gradfree advise`` recommends is than the best of all that it might have recommended.

``python .ci/regret.py OUT.jsonl [MODEL ...]``: of each model, the advice within a short budget, without compiling; then
every candidate with backpropagation's gradient in turns, until the figures stand. A line of JSON for each model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import gradfree
from gradfree.benchmarks.advice.contest import Budget, Contestant, contest, rows_to_try
from gradfree.benchmarks.advice.job import Job
from gradfree.benchmarks.advice.recommendation import AS_GOOD, advise
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import BACKPROP
from gradfree.benchmarks.timing.speed import clocked

BUDGET = 8.0
ROUNDS = 7


class Last(nn.Module):
    """A recurrent layer, and a linear one on its last output."""

    def __init__(self, layer: nn.Module, width: int):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 4) for ``x``, (B, T, 16)."""
        return self.head(self.layer(x)[0][:, -1])


def _recurrent(kind: type[nn.Module], width: int, batch: int, steps: int, **options: bool | int) -> tuple:
    outputs = width * (2 if options.get("bidirectional") else 1)
    return lambda: Last(kind(16, width, batch_first=True, **options), outputs), (batch, steps, 16)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gru_long": _recurrent(nn.GRU, 64, 1, 1024),
    "gru_wide_batch": _recurrent(nn.GRU, 64, 32, 64),
    "gru_two_layers": _recurrent(nn.GRU, 64, 8, 64, num_layers=2),
    "gru_both_ways": _recurrent(nn.GRU, 64, 8, 64, bidirectional=True),
    "lstm_long": _recurrent(nn.LSTM, 64, 1, 1024),
    "lstm_wide_batch": _recurrent(nn.LSTM, 64, 32, 64),
    "rnn_long": _recurrent(nn.RNN, 64, 1, 1024),
    "rnn_wide_batch": _recurrent(nn.RNN, 64, 32, 64),
    "cell_layer": (lambda: Last(gradfree.CellLayer(nn.GRUCell(16, 32), batch_first=True), 32), (8, 64, 16)),
    "residual_mlp": (lambda: gradfree.create_model("residual_mlp", in_features=16, num_classes=4, depth=16), (32, 16)),
    "resnet": (lambda: gradfree.create_model("preact_resnet", depth=14, in_channels=1, num_classes=4), (16, 1, 8, 8)),
    "layers": (lambda: nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(16, 16), nn.Tanh()))), (32, 16)),
}


def __getattr__(name: str) -> Callable[[], object]:
    """Return what builds a model of the table, or its batch: ``regret:gru_long``, ``regret:gru_long_data``."""
    model = name.removesuffix("_data")
    if model not in MODELS:
        raise AttributeError(name)
    build, shape = MODELS[model]
    return build if model == name else lambda: [(torch.randn(shape), torch.randint(4, shape[:1]))] * 2


def _is_right(row: Row, net: nn.Module, job: Job) -> bool:
    try:
        found = gradfree.gradient_fidelity(row.create_engine(), net, job.loss_fn, job.batches[0])
    except gradfree.ChainError:
        return False
    return found.total.cosine >= AS_GOOD


def measured(name: str) -> dict[str, object]:
    """Return the advice for a model, what it costs, and what the best costs, in plain backpropagation's time."""
    torch.manual_seed(0)
    job = Job(f"regret:{name}", f"regret:{name}_data", None, None, "cpu")
    net = job.build()
    _, rows = rows_to_try(net, None)
    standings = contest(job, net, rows, Budget(BUDGET), lambda what: None)
    advice = advise(standings, "not compiled", None)
    candidates = [BACKPROP, *(row for row in rows if _is_right(row, net, job))]
    steps = {row.label: Contestant.of(row, net, job).step for row in candidates}
    times: dict[str, list[float]] = {label: [] for label in steps}
    for n in range(ROUNDS + 1):
        for label, step in steps.items():
            seconds = clocked(lambda step=step: step(job.batches[0]), 1)
            if n:
                times[label].append(seconds)
    plain = times[BACKPROP.label]
    found = {label: median(t / p for t, p in zip(own, plain, strict=True)) for label, own in times.items()}
    taken = advice.engine or BACKPROP.label
    best = min(found, key=found.__getitem__)
    regret = found[taken] / found[best] - 1
    return {"model": name, "taken": taken, "best": best, "regret": regret, "of plain": found, "words": advice.words}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    out, *names = sys.argv[1:]
    for name in names or MODELS:
        with Path(out).open("a", encoding="utf-8") as file:
            print(json.dumps(measured(name)), file=file, flush=True)
