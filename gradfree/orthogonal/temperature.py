"""The temperature after a chain of orthogonal layers, which have bounded logits: fixed, or learnt with the weights."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from gradfree.chains.memory import Memory
from gradfree.layers.layer_site import LOG_TEMPERATURE, OUTPUT_SUMS
from gradfree.torchside.private import uncompiled

LEARNT: Literal["learnt"] = "learnt"
_RATE = 0.05


class Temperature:
    """A forward hook on the chain's last layer that multiplies its output by the temperature T.

    A learnt T starts at 1. Each optimizer step subtracts 0.05 r from log T, with r = Σ g·y / Σ |g·y|, where y is the
    chain's output and g the gradient of the loss with respect to T y. So T moves against the loss. r measures how far
    the outputs agree, and does not depend on the scale of the loss. If all agree, T goes from 1 to 16 in 56 steps. T
    settles where the outputs are calibrated: high if classes are well separated, low if not. Ranks average both sums
    before each update, so T is the same as in one process with all batches.

    Args:
        memory: of the chain; stores log T before the last step, the sums of that step, and the sums since.
        given: T, or "learnt".
    """

    def __init__(self, memory: Memory, given: float | Literal["learnt"]):
        self._memory, self._given = memory, given
        # The sums since the last step. In `memory`, so that a dry run, which restores it, does not count.
        self._pending = memory.of("temperature")

    def factor(self, like: Tensor) -> float | Tensor:
        """Return T, in the dtype and on the device of ``like``."""
        if not isinstance(self._given, str):
            return self._given
        log = self._log()
        return 1.0 if log is None else log.to(like.device).exp().to(like.dtype)

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[object, ...], out: Tensor) -> Tensor:
        """Multiply the output."""
        scaled = out * self.factor(out)
        if self._given == LEARNT and scaled.requires_grad:
            scaled.register_hook(partial(self._add_sums, out.detach()))
        return scaled

    def _add_sums(self, out: Tensor, cotangent: Tensor) -> None:
        """Add Σ g·y and Σ |g·y| of a backward pass to those since the last step."""
        products = (out * cotangent).to(torch.promote_types(out.dtype, torch.float32))
        sums = torch.stack([products.sum(), products.abs().sum()])
        if "asked" in self._pending:
            # to(sums): the model may have moved to another device since.
            sums = sums + self._pending["asked"].to(sums)
        self._pending["asked"] = sums

    @torch.no_grad()
    def after_step(self) -> None:
        """Store log T and the sums of the backward passes since the last step; :meth:`factor` uses both."""
        sums = self._pending.pop("asked", None)
        if sums is not None:
            log = self._log()
            self._memory.of("means").update(
                {LOG_TEMPERATURE: sums.new_zeros(()) if log is None else log.to(sums), OUTPUT_SUMS: sums}
            )

    def _log(self) -> Tensor | None:
        """Return log T after the update of the last step, which ignores NaN; ``None`` before the first step."""
        means = self._memory.of("means")
        if LOG_TEMPERATURE not in means:
            return None
        # NaN: a mean over ranks none of which has taken a step yet.
        log = means[LOG_TEMPERATURE].nan_to_num()
        if OUTPUT_SUMS not in means:
            return log
        sums = means[OUTPUT_SUMS]
        return log.to(sums) - _RATE * (sums[0] / sums[1]).nan_to_num(0.0, 0.0, 0.0)
