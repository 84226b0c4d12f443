"""A batch of equal modules as one graph: one ``vmap`` call runs them all, one autograd call computes all VJPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap


def call(structure: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the output of ``structure`` for ``x`` with these parameters and buffers, with a graph."""
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        out: Tensor = functional_call(structure, dict(tensors), (x,))
        return out


class Batch:
    """N equal modules, run with one input each.

    Args:
        structure: a copy of one module without its numbers, which runs in place of each.
        tensors: the parameters and buffers of the N modules, by name.
        trained: the names of those that need a gradient.
        inputs: one for each module.

    Attributes:
        inputs: the stacked inputs, (N, ...), leaves of the graph.
        weights: the stacked trained parameters, by name, leaves of the graph.
        out: the stacked outputs, (N, ...), the root of the graph.
    """

    def __init__(
        self,
        structure: nn.Module,
        tensors: Mapping[str, Sequence[Tensor]],
        trained: Sequence[str],
        inputs: Sequence[Tensor],
    ):
        with torch.no_grad():
            self.inputs = torch.stack(list(inputs)).requires_grad_()
            stacked = {name: torch.stack(list(values)) for name, values in tensors.items()}
        self.weights = {name: stacked[name].requires_grad_() for name in trained}
        run = vmap(lambda values, x: call(structure, values, x), randomness="error")
        with torch.enable_grad():
            self.out = run(stacked, self.inputs)

    def vjps(self, cotangents: Tensor) -> Tensor:
        """Return the VJPs of ``cotangents``, (N, ...), with respect to the inputs; keeps the graph."""
        (vjps,) = torch.autograd.grad(self.out, self.inputs, cotangents, retain_graph=True, materialize_grads=True)
        return vjps

    def gradients(self, cotangents: Tensor, keep: bool) -> tuple[dict[str, Tensor | None], Tensor]:
        """Return the VJPs of ``cotangents`` with respect to the weights, stacked, by name, and to the inputs."""
        targets = [*self.weights.values(), self.inputs]
        *weights, inputs = torch.autograd.grad(self.out, targets, cotangents, retain_graph=keep, allow_unused=True)
        return dict(zip(self.weights, weights, strict=True)), inputs


def matches(a: Tensor, b: Tensor) -> Tensor:
    """Return, as a tensor, whether ``a`` equals ``b`` up to rounding; true if empty or if ``b`` is not finite."""
    if not b.numel():
        return b.new_ones((), dtype=torch.bool)
    largest = b.abs().amax()
    rounding = min(1e3 * torch.finfo(b.dtype).eps, 0.1)
    return ((a - b).abs_().amax() <= rounding * largest) | ~largest.isfinite()
