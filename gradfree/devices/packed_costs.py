"""Expected times of a recurrent layer on packed sequences of several lengths: whole, in runs, or as a padded grid.

Each time is linear in the layer's sizes. The coefficients were fitted to measurements on one CPU thread, with float32:
they predict 80 % of 300 layers to within 25 %. ``benchmarks/scripts/packed_costs.py`` measures and prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from gradfree.devices.costs import runs_onednn

Layout = Literal["batch", "whole", "runs", "grid"]
"""How sequences run.

"batch": they have one length. Packed sequences of several lengths run "whole", as torch takes them; in "runs", where
steps with the same batch size are one batch; or as a "grid", padded to one length, in the closed form of ``backprop``.
"""

# Another layout must be expected to take at most this part of the time of "whole": the fit is that coarse.
_CLEARLY = 0.9


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

    def time(self, calls: int, steps: int, rows: int, units: int, inputs: int) -> float:
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
        "whole": Coefficients(208, 133, 1.5e-2, 3.5e-4, 9.9e-3, 1.2e-3, 1.2e-3),
        "runs": Coefficients(368, 5.7, 6.3e-3, 2.7e-4, 8.6e-3, 1.3e-4),
        "grid": Coefficients(1020, 48, 5.1e-2, 3.1e-4, 1.2e-2, 4.5e-4),
    },
    "GRU": {
        "whole": Coefficients(240, 128, 1.1e-2, 2.5e-4, 0.0, 1.3e-3, 8.3e-4),
        "runs": Coefficients(136, 127, 2.0e-2, 2.1e-4, 1.9e-3, 1.1e-3),
        "grid": Coefficients(968, 41, 2.8e-2, 2.2e-4, 4.9e-3, 4.7e-4),
    },
    "RNN": {
        "whole": Coefficients(223, 47, 6.5e-3, 6.7e-5, 0.0, 3.2e-4, 2.8e-4),
        "runs": Coefficients(127, 40, 8.2e-3, 6.6e-5, 4.3e-4, 4.0e-4),
        "grid": Coefficients(682, 17, 7.2e-3, 5.5e-5, 8.2e-4, 1.8e-4),
    },
}

# The forward pass alone, under ``no_grad``.
_EVALUATION: dict[str, dict[str, Coefficients]] = {
    "LSTM": {
        "whole": Coefficients(134, 16, 1.6e-2, 8.6e-5, 3.3e-3, 2.5e-4),
        "runs": Coefficients(107, 1.7, 1.1e-3, 9.1e-5, 2.3e-3, 5.3e-5),
    },
    "GRU": {
        "whole": Coefficients(123, 21, 9.0e-3, 7.1e-5, 1.1e-3, 1.8e-4),
        "runs": Coefficients(37, 15, 5.8e-3, 7.5e-5, 3.4e-4, 2.2e-4),
    },
    "RNN": {
        "whole": Coefficients(101, 7.8, 5.1e-3, 2.1e-5, 0.0, 6.8e-5),
        "runs": Coefficients(29, 5.9, 3.3e-3, 2.4e-5, 1.6e-4, 6.5e-5),
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
    if like.device.type != "cpu":
        return "whole"
    # An LSTM that oneDNN does not run step by step has a GRU's structure, and so about the same ratios.
    name = "GRU" if kind == "LSTM" and not runs_onednn(like, kind) else kind.partition("_")[0]
    of = (_TRAINING if trains else _EVALUATION)[name]
    steps, rows = sum(s for s, _ in runs), sum(s * b for s, b in runs)
    sizes = steps, rows, like.shape[1], inputs
    times: dict[Layout, float] = {"whole": _CLEARLY * of["whole"].time(1, *sizes)}
    times["runs"] = of["runs"].time(len(runs), *sizes)
    if "grid" in of:
        # Long runs may also be solved in closed form, and in segments, which the grid's forward pass cannot.
        if name != "LSTM":
            times["runs"] = min(times["runs"], of["grid"].time(len(runs), *sizes))
        times["grid"] = of["grid"].time(1, steps, steps * runs[0][1], *sizes[2:]) / _CLEARLY
    return min(times, key=times.__getitem__)
