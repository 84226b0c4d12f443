"""Operations that torch has only for accelerators, composed of other operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("aten", "IMPL")


def register() -> None:
    """Register the operations for the device."""
    for name, kernel in FUSED_CELLS.items():
        _add(name, kernel)
    _add("native_dropout", _native_dropout)
    _add("native_dropout_backward", _native_dropout_backward)


def _add(name: str, kernel: Callable[..., object]) -> None:
    _LIBRARY.impl(name, kernel, "PrivateUse1")


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1.0 - p)
    return _native_dropout_backward(x, kept, 0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept


def _native_dropout_backward(grad: Tensor, kept: Tensor, scale: float) -> Tensor:
    return grad * kept * scale


def _thnn_fused_gru_cell(
    inputs: Tensor, hidden: Tensor, h: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the new state, and the tensors for the backward pass."""
    if input_bias is not None:
        inputs, hidden = inputs + input_bias, hidden + hidden_bias
    (ir, iz, i_new), (hr, hz, h_new) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    r, z = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
    new = torch.tanh(i_new + r * h_new)
    return new + z * (h - new), torch.cat((r, z, new, h, h_new), 1)


def _thnn_fused_gru_cell_backward(
    grad: Tensor, saved: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of both kinds of gates, of the state and of both biases."""
    r, z, new, h, h_new = saved.chunk(5, 1)
    to_new = grad * (1 - z) * (1 - new * new)
    to_r, to_z = to_new * h_new * r * (1 - r), grad * (h - new) * z * (1 - z)
    inputs, hidden = torch.cat((to_r, to_z, to_new), 1), torch.cat((to_r, to_z, to_new * r), 1)
    return inputs, hidden, grad * z, *((inputs.sum(0), hidden.sum(0)) if has_bias else (None, None))


def _thnn_fused_lstm_cell(
    inputs: Tensor, hidden: Tensor, c: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new output and state, and the tensors for the backward pass."""
    gates = inputs + hidden
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    new = f * c + i * g
    return o * torch.tanh(new), new, torch.cat((i, f, g, o), 1)


def _thnn_fused_lstm_cell_backward(
    grad_h: Tensor | None, grad_c: Tensor | None, c: Tensor, new: Tensor, saved: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the gates, of the state and of the bias."""
    if grad_h is None and grad_c is None:
        return None, None, None
    i, f, g, o = saved.chunk(4, 1)
    grad_h = torch.zeros_like(new) if grad_h is None else grad_h
    grad_c = torch.zeros_like(new) if grad_c is None else grad_c
    squashed = torch.tanh(new)
    to_c = grad_c + grad_h * o * (1 - squashed * squashed)
    of_gates = (to_c * g * i * (1 - i), to_c * c * f * (1 - f), to_c * i * (1 - g * g), grad_h * squashed * o * (1 - o))
    gates = torch.cat(of_gates, 1)
    return gates, to_c * f, gates.sum(0) if has_bias else None


FUSED_CELLS: dict[str, Callable[..., object]] = {
    "_thnn_fused_gru_cell": _thnn_fused_gru_cell,
    "_thnn_fused_gru_cell_backward": _thnn_fused_gru_cell_backward,
    "_thnn_fused_lstm_cell": _thnn_fused_lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _thnn_fused_lstm_cell_backward,
}
"""The operations of ``nn.GRUCell`` and ``nn.LSTMCell``, by name."""
