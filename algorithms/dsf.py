"""Diagonal state feedbacks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from gradfree.chains.chain import Chain
from gradfree.chains.report import path_name
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.devices.hardware import to_device
from gradfree.engines.options import check_count
from gradfree.engines.sweeps import SweepEngine
from gradfree.errors import ChainError

_NAMED = ("linspace", "gate")


@dataclass(frozen=True, kw_only=True)
class DSF(SweepEngine):
    """Diagonal state feedbacks: one constant diagonal replaces every link's Jacobian, δ_t = e_t + δ_{t+1} ⊙ a.

    "Diagonal state feedbacks", arXiv 2503.23104. Exact if every link's Jacobian is that diagonal; parameter
    gradients are exact given δ. The paper's feedback is a fixed ramp. The mean of the cell's gate costs the same and
    is closer to the true gradient.

    Args:
        feedback: a. "linspace": from 0 to 1 over the units, as in the paper. "gate": a running mean of the update
            gate (GRU) or forget gate (LSTM, for c only), saved in checkpoints. Or a number for all units, or a
            tensor or sequence of H numbers. ``None``: "gate" for recurrent layers whose cell has a gate, else
            "linspace". Units are the last dimension of a state, in images the columns.
        iterations: sweeps that refine the result as in Highway-BP; 0 is the paper's algorithm.
    """

    worth_trying: ClassVar = ({"feedback": "linspace"}, {"feedback": "gate"})
    feedback: str | float | Sequence[float] | Tensor | None = None
    iterations: int = 0

    def __post_init__(self) -> None:
        check_count(self, "iterations", least=0)
        values = self.feedback
        if values is None:
            return
        if isinstance(values, str):
            if values not in _NAMED:
                raise ValueError(f"DSF: feedback must be 'linspace', 'gate', a number or a tensor, not {values!r}.")
            return
        try:
            if isinstance(values, bool):
                raise TypeError
            numbers = torch.as_tensor(values, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"DSF: feedback must be 'linspace', 'gate', a number or a tensor, not {values!r}."
            ) from None
        if numbers.dim() > 1 or numbers.numel() == 0 or not numbers.isfinite().all():
            raise ValueError("DSF: feedback must be one finite number, or one for each unit.")
        # As a tuple, since a tensor has no useful ==, repr or hash.
        object.__setattr__(self, "feedback", numbers.item() if numbers.dim() == 0 else tuple(numbers.tolist()))

    @property
    def needs_residual(self) -> bool:
        """Whether the feedback is the gate's mean."""
        return self.feedback == "gate"

    @property
    def keeps_means(self) -> bool:
        """Whether the feedback is the gate's mean."""
        return self.needs_residual

    @property
    def sharper(self) -> DSF:
        """The engine with twice as many sweeps."""
        return replace(self, iterations=max(1, 2 * self.iterations))

    @property
    def sweeps(self) -> int:
        """Return ``iterations``."""
        return self.iterations

    def install(self, site: Site, attachment: Attachment) -> Sequence[Removable]:
        """Put the engine on one chain, with the feedback that its cell allows."""
        if self.feedback is None:
            gated = site.dimension == "time" and site.has_residual
            if site.hidden_gate:
                warnings.warn(
                    f"{path_name(site.path)}: {site.hidden_gate} DSF takes 'linspace' for it, which is much worse than "
                    "'gate'. Or say feedback='linspace'.",
                    stacklevel=4,
                )
            attachment.engine = replace(self, feedback="gate" if gated else "linspace")
        return super().install(site, attachment)

    def split(self, chain: Chain) -> Any:
        """Return K = diag(a)."""
        units = chain.like.shape[-1]
        # In float32 at least: powers of a reach over 1 / (1 - a) steps, which bfloat16 rounds too coarsely.
        wide = torch.promote_types(chain.like.dtype, torch.float32)
        if self.feedback == "gate":
            return chain.mean_residual(momentum=0.1)
        if self.feedback in ("linspace", None):
            return chain.constant(torch.linspace(0, 1, units, dtype=wide, device=chain.like.device))
        if isinstance(self.feedback, tuple):
            if len(self.feedback) != units:
                raise ChainError(
                    f"DSF: feedback has {len(self.feedback)} numbers, but the states have {units} units, their last "
                    "dimension. Give one number for each, or one for all."
                )
            numbers = torch.tensor(self.feedback, dtype=wide, device="cpu")
            return chain.constant(to_device(numbers, chain.like.device))
        return chain.constant(cast("float", self.feedback))
