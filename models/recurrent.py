"""One recurrent layer, torch's own or ParaRNN's, by the name of its cell."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradfree.models.para_rnn import ParaGRU, ParaLSTM

_MODULES: dict[str, Callable[..., nn.Module]] = {
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "rnn": nn.RNN,
    "para_gru": ParaGRU,
    "para_lstm": ParaLSTM,
}


def recurrent(cell: str, width: int) -> nn.Module:
    """Return one batch-first layer with inputs and states of ``width`` features.

    Args:
        cell: "gru", "lstm", "rnn" for the plain tanh cell, or "para_gru", "para_lstm" for ParaRNN's.
        width: of inputs and states.

    Raises:
        ValueError: unknown cell.
    """
    if cell not in _MODULES:
        raise ValueError(f"cell must be one of {', '.join(map(repr, _MODULES))}, not {cell!r}.")
    return _MODULES[cell](width, width, batch_first=True)


def run(module: nn.Module, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs, (B, T, width), and the final state of one layer, a single tensor for every cell.

    Args:
        module: what :func:`recurrent` returned.
        x: inputs, (B, T, width).
        state: initial state, (parts, B, width): h, and for LSTMs c behind it; ``None`` is zero.
    """
    if isinstance(module, nn.LSTM | ParaLSTM):
        out, final = module(x, None if state is None else state.split(1))
        return out, torch.cat(final)
    return module(x, state)
