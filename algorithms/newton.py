"""Newton's method in time: exact training of recurrent layers with no pass over all steps in sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from gradfree.chains.chain import ChainGradients
from gradfree.chains.report import Report
from gradfree.chains.site import Site
from gradfree.engines.to_tolerance import ToleranceEngine
from gradfree.loops.recurrence import Runner
from gradfree.newton.iteration import NewtonOptions
from gradfree.newton.newton_backward import newton_gradients
from gradfree.newton.newton_forward import newton_forward
from gradfree.scans.narrow import WIDEST_ROW
from gradfree.scans.rules import LoopRule
from gradfree.scans.segmented_loop import run_loop
from gradfree.time.cell_layer import CellLayer, runs_by_units
from gradfree.time.forward import Forward, LayerCall

_JACOBIANS = ("gate", "diagonal")


@dataclass(frozen=True, kw_only=True)
class Newton(ToleranceEngine):
    """Recurrent layers by quasi-Newton sweeps over all steps at once, in both passes, until convergence.

    A sweep is h ← h + (I - K)⁻¹ (f(h) - h): the cell at all steps at once, then one scan along K. With the diagonal of
    F for K this is quasi-DEER (Gonzalez et al., NeurIPS 2024, arXiv 2407.19115), after DEER (Lim et al., ICLR 2024,
    arXiv 2309.12252). For cells with a diagonal Jacobian, such as ``gradfree.models.ParaGRU``, it is ParaRNN (Danieli
    et al., ICLR 2026, arXiv 2510.21450) and takes three to five sweeps. The first guess is f(0, x). The backward pass
    is linear: one scan if K is all of F, else sweeps as in the forward pass.

    Outputs and gradients equal those of backpropagation to the tolerance. If the sweeps of a pass do not converge, the
    layer runs sequentially, also in the following passes; sweeps are tried again after a growing number of passes.

    Step functions and other cells, with states of up to eight numbers a row, run at once with all of F for K, dense and
    not limited (DEER). Sweeps stop after about a tenth of the loop's time unless each one halves the mismatch. With
    ``max_sweeps`` left out, the first calls are timed, and the loop is kept where it is faster.

    Args:
        jacobian: K, limited to magnitudes up to 1: "gate", the layer's gate; or "diagonal", the diagonal of F, for an
            LSTM the 2×2 block of each unit.
        tolerance: the largest remaining change, relative to the largest state or cotangent, masks left out.
            ``None``: 1e-12 in float64, 1e-5 in float32, and for other dtypes the finest tolerance that they
            allow. Where products round their factors (TF32, autocast), at least 8 times that rounding error.
        max_sweeps: the most sweeps. ``None``: as many as take about as long as the sequential call, which for torch's
            own layers on a CPU is none; for step functions about half the time of the loop.
        evaluation: whether layers run by sweeps without gradients, too. ``False``: outputs of evaluation are bitwise
            torch's.
    """

    namespace: ClassVar[str] = "newton"
    jacobian: str = "diagonal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jacobian not in _JACOBIANS:
            allowed = ", ".join(map(repr, _JACOBIANS))
            raise ValueError(f"Newton: jacobian must be one of {allowed}, not {self.jacobian!r}.")

    @property
    def forwards(self) -> Sequence[Forward]:
        """The forward pass by Newton sweeps over all steps."""
        return (partial(newton_forward, self.options),)

    @property
    def loops(self) -> Runner:
        """Any step function with a narrow carry, all steps at once."""
        return partial(run_loop, LoopRule(newton=self.options))

    def may_gain(self, report: Report) -> bool:
        """Return whether there are other chains than wide cells of any kind, which run as the loop."""
        blocks = [block for site in report.chains.values() for block in site.blocks.values()]
        return not all(map(_is_wide, blocks))

    def may_sweep(self, call: LayerCall) -> bool:
        """Return whether the length and the options allow sweeps."""
        # The layout of packed sequences is chosen without sweeps, unless these are asked for.
        given = self.max_sweeps is not None or not call.is_packed
        return given and self.options.stopping(call.length, call.like, call.mode) is not None

    def records_units(self, length: int, like: Tensor) -> bool:
        """Return whether sweeps may pay; else the cell runs as any other."""
        return self.options.stopping(length, like, "separate units") is not None

    def problems_with(self, site: Site) -> Iterator[str]:
        """Yield why the engine cannot be attached to a chain, which it records if its cell is elementwise."""
        yield from super().problems_with(site)
        if any(isinstance(block, CellLayer) and runs_by_units(block.cell) for block in site.blocks.values()):
            yield from site.problems_when_linearised()

    def gradients(self, chain: Any, direct: Any) -> ChainGradients:
        """Return the gradients, exact to the tolerance."""
        return newton_gradients(chain, direct, self.options)

    @property
    def needs_residual(self) -> bool:
        """Whether the Jacobian is that of the gate."""
        return self.jacobian == "gate"

    @property
    def options(self) -> NewtonOptions:
        """The options of Newton's method."""
        return NewtonOptions(self.jacobian, self.tolerance, self.max_sweeps)


def _is_wide(block: nn.Module) -> bool:
    if not isinstance(block, CellLayer) or runs_by_units(block.cell):
        return False
    return block.row_width is not None and block.row_width > WIDEST_ROW
