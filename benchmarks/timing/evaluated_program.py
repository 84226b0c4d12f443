"""Cost of a validation step of a whole program: a convolution and recurrent layers on a long series."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.timing.timed import Timing, timed

PLAIN = "plain"


@dataclass(frozen=True)
class Program:
    """A convolution over time, two GRUs and a linear head, on one series of 8 channels.

    Attributes:
        steps: T.
        units: H of each GRU, and the channels of the convolution.
    """

    steps: int
    units: int

    def __str__(self) -> str:
        return f"convolution, 2 GRUs (1, {self.steps}, {self.units})"


class ProgramNet(nn.Module):
    """The net of a :class:`Program`."""

    def __init__(self, units: int):
        super().__init__()
        self.front = nn.Conv1d(8, units, 5, padding=2)
        self.first, self.second = (nn.GRU(units, units, batch_first=True) for _ in range(2))
        self.head = nn.Linear(units, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a number for each step of ``x`` (B, 8, T)."""
        h = self.front(x).relu().transpose(1, 2)
        return self.head(self.second(self.first(h)[0])[0])


class ValidationStep:
    """A validation step: the model in evaluation mode, and the loss, without gradients."""

    def __init__(self, case: Timing, row: Row | None = None):
        torch.manual_seed(case.seed)
        program: Program = case.item
        self.net = ProgramNet(program.units).to(case.device).eval()
        self.x = torch.randn(1, 8, program.steps, device=case.device)
        self.y = torch.randn(1, program.steps, 1, device=case.device)
        if row is not None:
            row.create_engine().attach(self.net)

    @torch.no_grad()
    def __call__(self) -> None:
        """Run the step."""
        nn.functional.mse_loss(self.net(self.x), self.y)


@timed(
    kind="evaluated program",
    subject="program",
    metric="time of a validation step",
    runs=1,
    title="validation step of a program",
    names={"program": "setting"},
    across="row",
)
def evaluated_program(case: Timing) -> Mapping[str, Callable[[], ValidationStep]]:
    """Return, by label, functions that build the steps: plain, and with each engine."""
    steps = {PLAIN: partial(ValidationStep, case)}
    return steps | {row.label: partial(ValidationStep, case, row) for row in case.rows}
