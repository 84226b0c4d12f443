"""Reads the residual path of a block from the autograd graph of its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradfree.algebra.cotangents import Factor, is_number


def _norm_scale(scale: Tensor, weight: Tensor | None) -> list[Factor]:
    return [scale if weight is None else scale * weight.detach()]


def _batch_norm_scale(node: Any) -> list[Factor]:
    shape = [1, -1] + [1] * (node._saved_input.dim() - 2)
    weight = node._saved_weight
    weight = 1.0 if weight is None else weight.detach().view(shape)
    if node._saved_training:
        return [node._saved_result2.view(shape) * weight]
    eps = node._saved_epsilon if hasattr(node, "_saved_epsilon") else node._saved_eps
    return [(node._saved_running_var + eps).rsqrt().view(shape) * weight]


def _dropout_mask(node: Any) -> list[Factor]:
    kept = 1.0 - node._saved_p
    return [node._saved_result1 / kept if kept else 0.0]


def _product(node: Any) -> list[Factor]:
    # Autograd keeps a factor only where the other one needs a gradient.
    return [0.0 if f is None else _plain(f) for f in (node._saved_other, node._saved_self)]


def _plain(factor: Tensor) -> Tensor:
    """Return ``factor`` detached; a tensor that wraps a Python number is cloned to an ordinary one.

    The mean() of a wrapped number is garbage if its dtype is not the default dtype.
    """
    return factor.detach().clone() if factor.dim() == 0 else factor.detach()


def _gru_gate(node: Any) -> list[Factor]:
    # r, z, n, h and a part of n's pre-activation, of nn.GRUCell on an accelerator.
    return [0.0, 0.0, node._saved_result1.chunk(5, 1)[1]]


def _lstm_gate(node: Any) -> list[Factor]:
    # i, f, g and o, of nn.LSTMCell on an accelerator.
    return [0.0, 0.0, node._saved_result2.chunk(4, 1)[1]]


def _mix(weight: Factor) -> list[Factor]:
    return [1.0 - weight, weight]


_DIAGONAL: dict[str, tuple[int, Callable[[Any], list[Factor]]]] = {
    "SubBackward0": (2, lambda node: [1.0, -float(node._saved_alpha)]),
    "NegBackward0": (1, lambda node: [-1.0]),
    "DivBackward0": (1, lambda node: [1 / _plain(node._saved_other)]),
    "AddBackward0": (2, lambda node: [1.0, float(node._saved_alpha)]),
    "CloneBackward0": (1, lambda node: [1.0]),
    "LerpBackward0": (2, lambda node: _mix(float(node._saved_weight))),
    "LerpBackward1": (2, lambda node: _mix(_plain(node._saved_weight))),
    "MulBackward0": (2, _product),
    "NativeBatchNormBackward0": (1, _batch_norm_scale),
    "CudnnBatchNormBackward0": (1, _batch_norm_scale),
    "FusedRmsNormBackward0": (1, lambda node: _norm_scale(node._saved_result1, node._saved_weight)),
    "MiopenBatchNormBackward0": (1, _batch_norm_scale),
    "NativeDropoutBackward0": (1, _dropout_mask),
    "NativeLayerNormBackward0": (1, lambda node: _norm_scale(node._saved_result2, node._saved_weight)),
    "ReluBackward0": (1, lambda node: [node._saved_result > 0]),
    "ThnnFusedGruCellBackward0": (3, _gru_gate),
    "ThnnFusedLstmCellBackward0": (3, _lstm_gate),
    "ToCopyBackward0": (1, lambda node: [1.0]),
}
"""Elementwise operations by node name: the number of inputs, and a function that returns ∂output/∂input for each.

The function reads each saved tensor only once, because a checkpoint returns it only once.

The mean and variance of norms belong to J, as do all operations that are not listed and all further inputs.
"""


_OUTPUT = {"ThnnFusedLstmCellBackward0": 1}
"""The output that :data:`_DIAGONAL` is about, by default the first: of an LSTM cell c, as h is behind a tanh."""


def residual_factor(out: Tensor, state: GradientEdge) -> Factor:
    """Return K of ∂out/∂state = K + J, the diagonal of the skip connections from ``state`` to ``out``.

    Follows every path of sums, products, quotients, mixtures, masks, ReLUs, scales α/σ of norms, and reshapes that
    cancel, from ``out`` back to ``state``. Paths through other operations belong to J. So K is 1 for x + g(x), the ReLU
    mask for ReLU(x + g(x)), α/σ for LN(x + g(x)) (Highway-BP, arXiv 2501.17086, Table 1), the gate for
    t⊙g(x) + (1-t)⊙x.

    Args:
        out: a block's output, attached to the graph of its forward pass.
        state: the graph edge at which the state enters that graph.

    Returns:
        A number, or a tensor that broadcasts to ``out``; 0.0 if no such path exists.
    """
    return _factor(out.grad_fn, out.output_nr, _Shape(out.shape, out.shape), state, {})


_Known = dict[tuple[Any, ...], Any]


class _Shape(NamedTuple):
    """The shape of a tensor inside a block that is a reshape of the block's output.

    Attributes:
        own: the tensor's shape.
        whole: the output's shape.
    """

    own: torch.Size
    whole: torch.Size

    def lift(self, factor: Factor) -> Factor:
        """Return a factor for the tensor's elements, reshaped to the output's shape."""
        if self.own == self.whole or not isinstance(factor, Tensor) or not factor.dim():
            return factor
        return factor.expand(self.own).reshape(self.whole)


def _factor(node: Any, slot: int, shape: _Shape, state: GradientEdge, known: _Known) -> Factor:
    """Return the diagonal of ∂(output ``slot`` of ``node``)/∂state, in the shape of the block's output.

    Args:
        node: an operation of the block; ``None`` where autograd records none.
        slot: the number of its output.
        shape: of that output.
        state: the edge at which to stop.
        known: cache: diagonals by (node, slot, shape), and the factors of a node by (node,).
    """
    if node is state.node:
        return float(slot == state.output_nr and shape.own == shape.whole)
    key = (node, slot, shape.own)
    if key in known:
        return known[key]
    total: Factor = 0.0
    # The same as node.name(), but faster.
    name = type(node).__name__
    if name in _DIAGONAL and slot == _OUTPUT.get(name, 0):
        count, read = _DIAGONAL[name]
        factors = [_factor(before, n, shape, state, known) for before, n in node.next_functions[:count]]
        # Saved tensors are read only if they count: in a checkpoint, that runs the block again.
        if any(isinstance(factor, Tensor) or factor for factor in factors):
            if (node,) not in known:
                known[node,] = read(node)
            for local, factor in zip(known[node,], factors, strict=False):
                if not is_number(local, 0.0) and not is_number(factor, 0.0):
                    total = _sum(total, _product_of(shape.lift(local), factor))
    elif name in _RESHAPING:
        ((before, n), *_) = node.next_functions
        total = _factor(before, n, shape._replace(own=torch.Size(node._saved_self_sym_sizes)), state, known)
    known[key] = total
    return total


def _sum(a: Factor, b: Factor) -> Factor:
    if is_number(a, 0.0) or is_number(b, 0.0):
        return b if is_number(a, 0.0) else a
    # For two boolean masks, + would be the union.
    return a.int() + b if isinstance(a, Tensor) and a.dtype is torch.bool else a + b


def _product_of(a: Factor, b: Factor) -> Factor:
    if is_number(a, 1.0) or is_number(b, 1.0):
        return b if is_number(a, 1.0) else a
    return a * b


_RESHAPING = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
"""Operations that only change the shape."""
