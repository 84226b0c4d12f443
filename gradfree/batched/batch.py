"""Modules that are alike as one graph: one call linearises them all, one more pulls cotangents back through them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

Autocast = tuple[str, torch.dtype, bool]
"""A device type, the lower precision, and whether it is used."""


class Bare(nn.Module):
    """A module without the hooks on it, and without what an engine has put in place of its ``forward``."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        """Return what the module makes of ``x``."""
        return type(self.module).forward(self.module, x)


class Batch:
    """N modules that are alike, at one input each.

    Args:
        module: stands for all; its own hooks do not run.
        tensors: the parameters and buffers of the N modules, by name.
        trained: which of them need a gradient; the user may have changed that since the forward pass.
        inputs: what each was given, (N, ...).
        autocast: as it was.
        stacked: those of the tensors that are stacked already.

    Attributes:
        inputs: leaves of the graph.
        weights: likewise, the trained parameters stacked, by name.
        out: the root of the graph, (N, ...).
    """

    def __init__(
        self,
        module: nn.Module,
        tensors: Mapping[str, Sequence[Tensor]],
        trained: Mapping[str, bool],
        inputs: Tensor,
        autocast: Autocast,
        stacked: Mapping[str, Tensor],
    ):
        device, dtype, enabled = autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled, cache_enabled=False):
            self.inputs = inputs.detach().requires_grad_(inputs.is_floating_point())
            self.weights: dict[str, Tensor] = {}
            own: dict[str, Tensor] = {}
            for name, values in tensors.items():
                with torch.no_grad():
                    stack = stacked[name].detach() if name in stacked else torch.stack(list(values))
                own[f"module.{name}"] = stack.requires_grad_(trained[name])
                if trained[name]:
                    self.weights[name] = stack
            bare = Bare(module)
            run = vmap(lambda own, x: functional_call(bare, own, (x,)), randomness="error")
            with _without_fallback():
                self.out = run(own, self.inputs)

    def pull(self, cotangents: Tensor) -> Tensor | None:
        """Return what ``cotangents``, (N, ...), of the outputs bring to the inputs; keeps the graph."""
        return self._grad([self.inputs], cotangents, keep=True)[0]

    def gradients(
        self, cotangents: Tensor, keep: bool, of_inputs: bool
    ) -> tuple[dict[str, Tensor | None], Tensor | None]:
        """Return what ``cotangents`` bring to the weights, each stacked, by name, and to the inputs, if asked for.

        One call for both takes as long as for the weights alone. It is to ``keep`` the graph, or frees it.
        """
        found = self._grad([*self.weights.values(), *[self.inputs] * of_inputs], cotangents, keep)
        return dict(zip(self.weights, found, strict=False)), found[-1] if of_inputs else None

    def _grad(self, targets: list[Tensor], cotangents: Tensor, keep: bool) -> Sequence[Tensor | None]:
        if not targets or not self.out.requires_grad:
            return [None] * len(targets)
        return torch.autograd.grad(self.out, targets, cotangents, retain_graph=keep, allow_unused=True)


def matches(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what :func:`all_close` does, in a fraction of its time, and true where ``b`` has what is not finite."""
    if not b.numel():
        return b.new_ones((), dtype=torch.bool)
    largest = b.abs().amax()
    return ((a - b).abs_().amax() <= _rounding(dtype) * largest) | ~largest.isfinite()


def all_close(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return, as a tensor, whether ``a`` and ``b`` are the same but for the rounding of products in ``dtype``."""
    scale = b.abs().amax() if b.numel() else b.new_zeros(())
    near = (a - b).abs() <= _rounding(dtype) * (b.abs() + scale.nan_to_num())
    return (near | (a == b) | (a.isnan() & b.isnan())).all()


def _rounding(dtype: torch.dtype) -> float:
    return min(1e3 * torch.finfo(dtype).eps, 0.1)


@contextmanager
def _without_fallback() -> Iterator[None]:
    """Let vmap fail where torch has no batched operation: what it does instead, one by one, gains nothing."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)
