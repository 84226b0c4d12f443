"""The temperature behind a chain of orthogonal layers, whose logits are bounded: given, or learnt with the weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from gradfree.chains.memory import Memory
from gradfree.layers.layer_site import LOG_TEMPERATURE, OUTPUT_SUMS
from gradfree.torchside.private import is_reached, uncompiled

LEARNT: Literal["learnt"] = "learnt"
_RATE = 0.05
_LOG, _ASKED = f"mean of {LOG_TEMPERATURE}", f"mean of {OUTPUT_SUMS}"


class Temperature:
    """What the chain's output is multiplied by, as a forward hook on its last layer.

    Learnt, it starts at 1, and each step of the optimizer moves log T by 0.05 times r = Σ g·y / Σ |g·y|, where y is the
    chain's output and g the loss's gradient with respect to T y: against the loss, by a share that says how far the
    outputs agree, and that no scale of the loss changes. Where they all ask for the same it goes from 1 to 16 in 56
    steps. It ends where the outputs are calibrated: high where classes are well separated, low where they are not.
    Ranks average both sums before they are used: T is then that of one process with the batches of all.

    Args:
        memory: of the chain; keeps log T before the last step, the sums of that, and those since.
        given: T; "learnt" for one that is learnt.
    """

    def __init__(self, memory: Memory, given: float | Literal["learnt"]):
        self._memory, self._given = memory, given
        # What passes since the last step have asked for: who looks at a pass restores it with the rest.
        self._pending = memory.of("temperature")

    def factor(self, like: Tensor) -> float | Tensor:
        """Return T, for a tensor like ``like``."""
        if not isinstance(self._given, str):
            return self._given
        log = self._log()
        return 1.0 if log is None else log.to(like.device).exp().to(like.dtype)

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[object, ...], out: Tensor) -> Tensor:
        """Multiply the output."""
        scaled = out * self.factor(out)
        if self._given == LEARNT and scaled.requires_grad:
            trained = [p for p in module.parameters() if p.requires_grad]
            scaled.register_hook(partial(self._ask, out.detach(), trained))
        return scaled

    def _ask(self, out: Tensor, trained: Sequence[Tensor], cotangent: Tensor) -> None:
        # A pass for the gradient of the input alone (an adversarial example) trains nothing.
        if trained and not any(map(is_reached, trained)):
            return
        asked = (out * cotangent).to(torch.promote_types(out.dtype, torch.float32))
        sums = torch.stack([asked.sum(), asked.abs().sum()])
        if "asked" in self._pending:
            # The model may have been moved since.
            sums = sums + self._pending["asked"].to(sums)
        self._pending["asked"] = sums

    @torch.no_grad()
    def after_step(self) -> None:
        """Move it as the backward passes since the last step have asked for; those that were no numbers have not."""
        asked = self._pending.pop("asked", None)
        if asked is not None:
            log = self._log()
            self._memory.of("means").update(
                {_LOG: asked.new_zeros(()) if log is None else log.to(asked), _ASKED: asked}
            )

    def _log(self) -> Tensor | None:
        """Return log T, moved by what was asked in the last step; ``None`` before the first."""
        means = self._memory.of("means")
        if _LOG not in means:
            return None
        # Of a mean over ranks none of which has taken a step there is nothing yet.
        log = means[_LOG].nan_to_num()
        if _ASKED not in means:
            return log
        asked = means[_ASKED]
        return log.to(asked) - _RATE * (asked[0] / asked[1]).nan_to_num(0.0, 0.0, 0.0)
