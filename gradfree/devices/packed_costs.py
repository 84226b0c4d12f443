"""Expected times of a recurrent layer on packed sequences of several lengths: whole, in runs, or as a padded grid.

Each time is linear in the layer's sizes. The coefficients were fitted to measurements on one CPU thread, with float32:
they predict 80 % of 250 layers to within 25 %. ``benchmarks/scripts/packed_costs.py`` measures and prints them. One
part is not linear: oneDNN prepares a kernel for each new shape of an LSTM, and forgets the oldest of some hundred. What
a call in runs costs for this reason was set by hand, so that on a second CPU none of 134 layers is slower than torch's
in training, and two are in evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

from torch import Tensor

from gradfree.devices.costs import SHORTEST, runs_onednn

RunT = TypeVar("RunT", bound=tuple[int, int])
Layout = Literal["batch", "whole", "runs", "grid"]
"""How sequences run.

"batch": they have one length. Packed sequences of several lengths run "whole", as torch takes them; in "runs", where
steps with about the same batch size are one batch; or as a "grid", padded to one length, in the closed form of
``backprop``.
"""

# Another layout must be expected to take at most this part of the time of "whole", in training and in evaluation: the
# fit is that coarse, and has more to lose than to gain where a pass is short.
_CLEARLY = {True: 0.9, False: 0.7}


class Coefficients(NamedTuple):
    """Microseconds of one pass of a layer, for each of its calls, steps, ... .

    Attributes:
        call: for each call of a kernel.
        step: for each step.
        state: for each element of a state, N · H.
        product: for each multiplication of the products with both weights, N · H (H + I).
        call_weight: for each element of the weights in each call, H (H + I).
        step_weight: for each element of the weights in each step.
        quadratic: for each element of all states in each step: torch's backward pass of packed sequences fills a tensor
            of the whole size in each step.
    """

    call: float
    step: float
    state: float
    product: float
    call_weight: float
    step_weight: float
    quadratic: float = 0.0

    def time(self, calls: float, steps: int, rows: float, units: int, inputs: int) -> float:
        """Return the microseconds for ``steps`` steps of ``rows`` rows in all."""
        weights, states = units * (units + inputs), rows * units
        return (
            calls * (self.call + self.call_weight * weights)
            + steps * (self.step + self.step_weight * weights + self.quadratic * states)
            + self.state * states
            + self.product * rows * weights
        )


# Both passes.
_TRAINING: dict[str, dict[str, Coefficients]] = {
    "LSTM": {
        "whole": Coefficients(260, 140, 0.031, 0.00031, 0, 0.0023, 0.001),
        "runs": Coefficients(800, 16, 0.013, 0.00024, 0.0085, 2.4e-05),
    },
    "GRU": {
        "whole": Coefficients(320, 130, 0.019, 0.0002, 0, 0.0017, 0.001),
        "runs": Coefficients(300, 51, 0.034, 0.00013, 0.0028, 0.0014),
        "grid": Coefficients(1000, 27, 0.031, 0.00021, 0.0032, 0.00067),
    },
    "RNN": {
        "whole": Coefficients(300, 49, 0.011, 5e-05, 0.0014, 0.00039, 0.00024),
        "runs": Coefficients(190, 20, 0.008, 5.9e-05, 0.0015, 0.00017),
        "grid": Coefficients(790, 11, 0.011, 4.2e-05, 0.0027, 0.00018),
    },
}

# The forward pass alone, under ``no_grad``. Only LSTMs gain from another layout.
_EVALUATION: dict[str, dict[str, Coefficients]] = {
    "LSTM": {
        "whole": Coefficients(130, 14, 0.016, 8.4e-05, 0.0012, 0.00033),
        "runs": Coefficients(500, 2.1, 0.0042, 7.2e-05, 0.0023, 3.7e-05),
    },
}


def packed_layout(kind: str, runs: Sequence[tuple[int, int]], like: Tensor, inputs: int, trains: bool) -> Layout:
    """Return the layout in which packed sequences of several lengths are expected to run fastest.

    On other devices than a CPU that is "whole": cuDNN takes packed sequences in one kernel.

    Args:
        kind: the torch cell.
        runs: the numbers of steps and of rows of each run, the largest batch first.
        like: a state, (B, H); not read.
        inputs: I.
        trains: whether both passes run, or the forward pass alone.
    """
    steps, rows = _totals(runs)
    of = _costs(kind, like, trains)
    if like.device.type != "cpu" or steps < SHORTEST or not of:
        return "whole"
    sizes = like.shape[1], inputs
    clearly = _CLEARLY[trains]
    times: dict[Layout, float] = {"whole": clearly * of["whole"].time(1, steps, rows, *sizes)}
    calls = in_calls(kind, runs, like, inputs, trains)
    padded = sum(_totals(call)[0] * call[0][1] for call in calls)
    times["runs"] = of["runs"].time(len(calls), steps, padded, *sizes)
    if "grid" in of:
        # Long runs may also be solved in closed form, and in segments, which the grid's forward pass cannot.
        times["runs"] = min(times["runs"], of["grid"].time(len(runs), steps, rows, *sizes))
        times["grid"] = of["grid"].time(1, steps, steps * runs[0][1], *sizes) / clearly
    return min(times, key=times.__getitem__)


def in_calls(kind: str, runs: Sequence[RunT], like: Tensor, inputs: int, trains: bool) -> list[list[RunT]]:
    """Return which neighbouring runs are one call, with padding: those for which it costs less than a call.

    That is so for oneDNN's LSTM alone. For others a call costs as much as a few steps.

    Args:
        kind: as in :func:`packed_layout`, like the others.
        runs: as in :func:`packed_layout`.
        like: as in :func:`packed_layout`.
        inputs: I.
        trains: as in :func:`packed_layout`.
    """
    if like.device.type != "cpu" or _row_of(kind, like) != "LSTM":
        return [[run] for run in runs]
    costs, sizes = _costs(kind, like, trains)["runs"], (like.shape[1], inputs)
    call, row = costs.time(1, 0, 0, *sizes), costs.time(0, 0, 1, *sizes)
    calls: list[list[RunT]] = []
    for run in runs:
        steps, rows = run
        if calls and steps * (calls[-1][0][1] - rows) * row < call:
            calls[-1].append(run)
        else:
            calls.append([run])
    return calls


def _costs(kind: str, like: Tensor, trains: bool) -> dict[str, Coefficients]:
    return (_TRAINING if trains else _EVALUATION).get(_row_of(kind, like), {})


def _totals(calls: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the number of steps and of rows of all calls."""
    return sum(steps for steps, _ in calls), sum(steps * rows for steps, rows in calls)


def _row_of(kind: str, like: Tensor) -> str:
    """Return the row of the tables: an LSTM that oneDNN does not run has a GRU's structure, and about its ratios."""
    return "GRU" if kind == "LSTM" and not runs_onednn(like, kind) else kind.partition("_")[0]
