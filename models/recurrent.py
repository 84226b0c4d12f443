"""One recurrent layer, torch's or ParaRNN's, created by the name of its cell."""

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


def recurrent(cell: str, width: int, clip: float | None = 0.5) -> nn.Module:
    """Return one batch-first layer with inputs and states of ``width`` features.

    Args:
        cell: "gru", "lstm", "rnn" (with tanh), or "para_gru", "para_lstm" of ParaRNN.
        width: width of inputs and states.
        clip: see :class:`~gradfree.models.ParaGRU`; only for ParaRNN's cells.

    Raises:
        ValueError: unknown cell, or a bad ``clip``.
    """
    if cell not in _MODULES:
        raise ValueError(f"cell must be one of {', '.join(map(repr, _MODULES))}, not {cell!r}.")
    own = {"clip": clip} if cell.startswith("para") else {}
    return _MODULES[cell](width, width, batch_first=True, **own)


def remember(module: nn.Module, steps: int) -> None:
    """Initialise a layer's gates so that its units remember for various times, up to ``steps`` steps.

    Chrono initialisation, Tallec & Ollivier 2018, "Can recurrent neural networks warp time?", arXiv 1804.11188, section
    2: the bias of the gate that keeps the state is log u, with u uniform between 1 and ``steps`` - 1. An LSTM's input
    gate gets the negative of it.

    Raises:
        ValueError: ``steps`` below 3, or a layer other than ``nn.GRU`` and ``nn.LSTM``.
    """
    if steps < 3 or not isinstance(module, nn.GRU | nn.LSTM):
        name = type(module).__name__
        raise ValueError(f"memory must be at least 3 steps of a cell 'gru' or 'lstm', not {steps} of {name}.")
    kept = torch.empty(module.hidden_size).uniform_(1, steps - 1).log()
    _, _, bias, other = module.parameters()
    with torch.no_grad():
        nn.init.zeros_(bias)
        nn.init.zeros_(other)
        gates = bias.chunk(3 if isinstance(module, nn.GRU) else 4)
        gates[1].copy_(kept)
        if isinstance(module, nn.LSTM):
            gates[0].copy_(-kept)


def run(module: nn.Module, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run one layer; return the outputs, (B, T, width), and the final state as one tensor, also for LSTMs.

    Args:
        module: what :func:`recurrent` returned.
        x: inputs, (B, T, width).
        state: initial state, (parts, B, width): h, and for LSTMs then c. ``None``: zero.
    """
    if isinstance(module, nn.LSTM | ParaLSTM):
        out, final = module(x, None if state is None else state.split(1))
        return out, torch.cat(final)
    return module(x, state)
