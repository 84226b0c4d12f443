"""The residual path of a block, read off the autograd graph of its forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradfree.algebra.cotangents import Factor, is_number


def _relu_mask(node: Node) -> list[Factor]:
    return [node._saved_result > 0]  # type: ignore[attr-defined]


def _layer_norm_scale(node: Node) -> list[Factor]:
    scale = node._saved_result2  # type: ignore[attr-defined]
    weight = node._saved_weight  # type: ignore[attr-defined]
    return [scale if weight is None else scale * weight.detach()]


def _product(node: Node) -> list[Factor]:
    # Autograd keeps a factor only where the other one needs a gradient.
    factors = (node._saved_other, node._saved_self)  # type: ignore[attr-defined]
    return [0.0 if f is None else _plain(f) for f in factors]


def _plain(factor: Tensor) -> Tensor:
    """Return ``factor`` without history; a Python number's tensor as one of the ordinary kind.

    The mean() of the kind that torch wraps a number in is garbage where its dtype is not the default one.
    """
    return factor.detach().clone() if factor.dim() == 0 else factor.detach()


# ∂output/∂input of the operations that act on each element of the state by itself, one factor an input. For
# LayerNorm the mean and the variance are the rest, J; so is everything that is not listed.
_DIAGONAL: dict[str, Callable[[Node], list[Factor]]] = {
    "SubBackward0": lambda node: [1.0, -float(node._saved_alpha)],  # type: ignore[attr-defined]
    "NegBackward0": lambda node: [-1.0],
    "DivBackward0": lambda node: [1 / _plain(node._saved_other)],  # type: ignore[attr-defined]
    "AddBackward0": lambda node: [1.0, float(node._saved_alpha)],  # type: ignore[attr-defined]
    "MulBackward0": _product,
    "NativeLayerNormBackward0": _layer_norm_scale,
    "ReluBackward0": _relu_mask,
    "ToCopyBackward0": lambda node: [1.0],
}


def residual_factor(out: Tensor, state: GradientEdge) -> Factor:
    """Return the diagonal K with ∂out/∂state = K + J that the skip connections from ``state`` to ``out`` carry.

    Follows every path of sums, products, quotients, ReLUs and LayerNorms (its scale α/σ) from ``out`` back to
    ``state``; paths through anything else belong to J. So K is 1 for x + g(x), the ReLU mask for
    ReLU(x + g(x)), α/σ for LN(x + g(x)) (Highway-BP, arXiv 2501.17086, Table 1), the gate for t⊙g(x) + (1-t)⊙x.

    Args:
        out: a block's output, attached to the graph of its forward pass.
        state: where the state enters that graph.

    Returns:
        A number, or a tensor that broadcasts to ``out``; 0.0 if no such path exists.
    """
    with torch.no_grad():
        return _factor(out.grad_fn, out.output_nr, state, {})


def _factor(node: Node | None, slot: int, state: GradientEdge, known: dict[Node, Factor]) -> Factor:
    """Return the diagonal from ``state`` to output ``slot`` of ``node``; ``known`` has those found before."""
    if node is state.node:
        return 1.0 if slot == state.output_nr else 0.0
    if node is None or node.name() not in _DIAGONAL:
        return 0.0
    if node not in known:
        total: Factor = 0.0
        for local, (before, n) in zip(_DIAGONAL[node.name()](node), node.next_functions, strict=False):
            total = _sum(total, _product_of(local, _factor(before, n, state, known)))
        known[node] = total
    return known[node]


def _sum(a: Factor, b: Factor) -> Factor:
    if is_number(a, 0.0) or is_number(b, 0.0):
        return b if is_number(a, 0.0) else a
    # Of two masks + would be the union.
    return a.int() + b if isinstance(a, Tensor) and a.dtype is torch.bool else a + b


def _product_of(a: Factor, b: Factor) -> Factor:
    if is_number(a, 0.0) or is_number(b, 0.0):
        return 0.0
    if is_number(a, 1.0) or is_number(b, 1.0):
        return b if is_number(a, 1.0) else a
    return a * b
