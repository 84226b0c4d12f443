"""Reads the residual path of a block from the autograd graph of its forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.nn import functional

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


class _Operation(NamedTuple):
    """An operation that is elementwise in its first inputs, as far as the residual path goes.

    Attributes:
        example: applies it to a tensor (2, 2, 1).
        inputs: the number of inputs that count; further ones belong to J.
        factors: returns ∂output/∂input for each of them from the operation's node. It reads each saved tensor only
            once, because a checkpoint returns it only once.
    """

    example: Callable[[Tensor], Tensor]
    inputs: int
    factors: Callable[[Any], list[Factor]]


def _of_batch_norm(x: Tensor, *further: bool) -> tuple[Any, ...]:
    """Return the positional arguments of a batch norm in training, and ``further`` ones."""
    scale, mean, variance = x[:, 0, 0], x.detach()[:, 0, 0].clone(), x.detach()[:, 0, 0].clone()
    return x, scale, scale, mean, variance, True, 0.1, 1e-5, *further


def _of_cell(x: Tensor, gates: int) -> tuple[Tensor, ...]:
    """Return state, weights and biases of a recurrent cell."""
    weight = x[:1, 0].expand(gates, 1)
    return x[0], weight, weight, weight[:, 0], weight[:, 0]


# Those of which others may be composed come first.
_OPERATIONS = {
    "x + y": _Operation(lambda x: x + x, 2, lambda node: [1.0, float(node._saved_alpha)]),
    "x - y": _Operation(lambda x: x - x, 2, lambda node: [1.0, -float(node._saved_alpha)]),
    "-x": _Operation(lambda x: -x, 1, lambda node: [-1.0]),
    "x * y": _Operation(lambda x: x * x, 2, _product),
    "x / y": _Operation(lambda x: x / x, 1, lambda node: [1 / _plain(node._saved_other)]),
    "clone": _Operation(lambda x: x.clone(), 1, lambda node: [1.0]),
    "a change of dtype": _Operation(lambda x: x.half(), 1, lambda node: [1.0]),
    "lerp by a number": _Operation(lambda x: torch.lerp(x, x, 0.5), 2, lambda node: _mix(float(node._saved_weight))),
    "lerp by a tensor": _Operation(lambda x: torch.lerp(x, x, x), 2, lambda node: _mix(_plain(node._saved_weight))),
    "ReLU": _Operation(lambda x: torch.relu(x), 1, lambda node: [node._saved_result > 0]),
    # Without elements it draws no random numbers.
    "dropout": _Operation(lambda x: torch.native_dropout(x[:0], 0.5, True)[0], 1, _dropout_mask),
    "layer norm": _Operation(
        lambda x: functional.layer_norm(x, x.shape),
        1,
        lambda node: _norm_scale(node._saved_result2, node._saved_weight),
    ),
    "RMS norm": _Operation(
        lambda x: functional.rms_norm(x, list(x.shape)),
        1,
        lambda node: _norm_scale(node._saved_result1, node._saved_weight),
    ),
    "batch norm": _Operation(lambda x: torch.batch_norm(*_of_batch_norm(x, True)), 1, _batch_norm_scale),
    "torch's batch norm": _Operation(lambda x: torch.native_batch_norm(*_of_batch_norm(x))[0], 1, _batch_norm_scale),
    "cuDNN's batch norm": _Operation(lambda x: torch.cudnn_batch_norm(*_of_batch_norm(x))[0], 1, _batch_norm_scale),
    "MIOpen's batch norm": _Operation(lambda x: torch.miopen_batch_norm(*_of_batch_norm(x))[0], 1, _batch_norm_scale),
    "a GRU cell": _Operation(lambda x: torch.gru_cell(x[0], *_of_cell(x, 3)), 3, _gru_gate),
    # Of an LSTM cell c: h is behind a tanh.
    "an LSTM cell": _Operation(lambda x: torch.lstm_cell(x[0], x.unbind(0), *_of_cell(x, 4)[1:])[1], 3, _lstm_gate),
}
"""The operations of a residual path. The mean and variance of norms belong to J, as do all other operations."""

_RESHAPES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.view(-1),
    lambda x: x.expand(2, 2, 2).mT.reshape(-1),
    lambda x: x[:, :1].reshape(2, 1),
)
"""Operations that only change the shape: a view, one of a copy, one of strides."""


class _Table(NamedTuple):
    """How the nodes of a device are read, by the classes that torch gives them.

    Attributes:
        operations: by node class, the number of the output, and the operation.
        reshapes: the classes of nodes that only change the shape.
    """

    operations: dict[type, tuple[int, _Operation]]
    reshapes: set[type]


@cache
def _table(device: str) -> _Table:
    """Return the table for a type of device, from the nodes that this torch makes there: it may rename them."""
    operations: dict[type, tuple[int, _Operation]] = {}
    # A first use may be inside a checkpoint or without gradients.
    with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):
        x = torch.ones(2, 2, 1, device=device, requires_grad=True)
        for name in _OPERATIONS:
            _add_row(operations, name, x)
        return _Table(operations, {type(reshape(x).grad_fn) for reshape in _RESHAPES})


def _add_row(rows: dict[type, tuple[int, _Operation]], name: str, x: Tensor) -> None:
    """Add an operation, unless the device lacks it or composes it of those before; warn if its node cannot be read."""
    operation = _OPERATIONS[name]
    try:
        out = operation.example(x)
        node: Any = out.grad_fn
        if type(node) in rows:
            return
        if len(node.next_functions) < operation.inputs:
            raise AttributeError(f"its node has {len(node.next_functions)} inputs, not {operation.inputs}")
        operation.factors(node)
        rows[type(node)] = out.output_nr, operation
    except AttributeError as error:
        warnings.warn(_UNREADABLE.format(version=torch.__version__, name=name, error=error), stacklevel=2)
    except RuntimeError:
        # The device lacks the operation.
        pass


_UNREADABLE = (
    "torch {version} runs {name} as an operation that gradfree does not know ({error}). Skip connections through it do "
    "not count, so gradients with few iterations are less close to autograd's; with k = L - 1 they are exact. Use a "
    "version of torch that gradfree is tested with, or declare the path: engine.attach(model, residual=1.0)."
)


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
    return _Walk(_table(out.device.type), state, {}).factor(out.grad_fn, out.output_nr, _Shape(out.shape, out.shape))


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


class _Walk(NamedTuple):
    """A walk through the graph of a block.

    Attributes:
        table: how nodes are read.
        state: the edge at which to stop.
        known: cache: diagonals by (node, slot, shape), and the factors of a node by (node,).
    """

    table: _Table
    state: GradientEdge
    known: dict[tuple[Any, ...], Any]

    def factor(self, node: Any, slot: int, shape: _Shape) -> Factor:
        """Return the diagonal of ∂(output ``slot`` of ``node``)/∂state, in the shape of the block's output.

        Args:
            node: an operation of the block; ``None`` where autograd records none.
            slot: the number of its output.
            shape: of that output.
        """
        if node is self.state.node:
            return float(slot == self.state.output_nr and shape.own == shape.whole)
        key = (node, slot, shape.own)
        if key not in self.known:
            self.known[key] = self._new_factor(node, slot, shape)
        return self.known[key]

    def _new_factor(self, node: Any, slot: int, shape: _Shape) -> Factor:
        if type(node) in self.table.reshapes:
            ((before, n), *_) = node.next_functions
            return self.factor(before, n, shape._replace(own=torch.Size(node._saved_self_sym_sizes)))
        output, operation = self.table.operations.get(type(node), (0, None))
        if operation is None or slot != output:
            return 0.0
        factors = [self.factor(before, n, shape) for before, n in node.next_functions[: operation.inputs]]
        # Saved tensors are read only if they count: in a checkpoint, that runs the block again.
        if not any(isinstance(factor, Tensor) or factor for factor in factors):
            return 0.0
        if (node,) not in self.known:
            self.known[node,] = operation.factors(node)
        total: Factor = 0.0
        for local, factor in zip(self.known[node,], factors, strict=False):
            if not is_number(local, 0.0) and not is_number(factor, 0.0):
                total = _sum(total, _product_of(shape.lift(local), factor))
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
