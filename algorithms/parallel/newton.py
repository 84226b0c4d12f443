"""Newton's method in time: exact training of recurrent layers with no pass over all steps in sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradfree.chains.chain import ChainGradients
from gradfree.convergence.passes import left_to_torch
from gradfree.engines.to_tolerance import ToleranceEngine
from gradfree.newton.newton_backward import newton_gradients
from gradfree.newton.newton_forward import NewtonForward
from gradfree.newton.newton_options import NewtonOptions
from gradfree.time.forward import Forward, LayerCall

_JACOBIANS = ("gate", "diagonal")


@dataclass(frozen=True, kw_only=True)
class Newton(ToleranceEngine):
    """Recurrent layers by quasi-Newton sweeps over all steps at once, forward and backward, until nothing changes.

    A sweep is h ← h + (I - K)⁻¹ (f(h) - h): one step of the cell at all steps, and one scan along K. DEER (Lim et al.,
    ICLR 2024, arXiv 2309.12252) with the diagonal of F for K, quasi-DEER (Gonzalez et al., NeurIPS 2024, arXiv
    2407.19115); of cells whose Jacobian is diagonal, such as ``gradfree.models.ParaGRU``, ParaRNN (Danieli et al.,
    ICLR 2026, arXiv 2510.21450), where three to five sweeps do. The first guess is f(0, x). The backward pass is
    linear: one scan where K is all of F, sweeps like the forward pass's elsewhere. Outputs and gradients are those of
    backpropagation to the tolerance: what does not settle in time runs sequentially, such a layer from then on; sweeps
    are tried again now and then.

    Args:
        jacobian: K: what the "gate" carries, or the "diagonal" of F, of an LSTM each unit's 2×2 block; both no larger
            than 1.
        tolerance: the largest change that is left, relative to the largest state or cotangent. ``None``: 1e-12 in
            float64, 1e-5 in float32, eight times what any other dtype resolves.
        max_sweeps: the most sweeps. ``None``: as many as take about as long as the sequential call, which for torch's
            own layers on a CPU may be none.
    """

    jacobian: str = "diagonal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jacobian not in _JACOBIANS:
            allowed = ", ".join(map(repr, _JACOBIANS))
            raise ValueError(f"Newton: jacobian must be one of {allowed}, not {self.jacobian!r}.")

    @property
    def forwards(self) -> Sequence[Forward]:
        """All steps at once."""
        return (NewtonForward(self._options),)

    def leave_to_torch(self, call: LayerCall) -> Callable[[], None] | None:
        """Leave to torch what is not swept, where its own kernel is faster than the closed form."""
        swept = self._options.stopping(call.length, call.like, call.mode) is not None
        return left_to_torch(call, "newton", swept)

    def gradients(self, chain: Any, direct: Any) -> ChainGradients:
        """Return the gradients to the tolerance."""
        return newton_gradients(chain, direct, self._options)

    @property
    def gate_remedy(self) -> str:
        """The gate is the Jacobian then."""
        return "that carries its state. Use jacobian='diagonal'." if self.jacobian == "gate" else ""

    @property
    def _options(self) -> NewtonOptions:
        return NewtonOptions(self.jacobian, self.tolerance, self.max_sweeps)
