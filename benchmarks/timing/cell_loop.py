"""Recurrent layers as Python loops over torch's cells: what the engines and torch's fused kernels are held against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

COMPILED = "compiled loop"

_CELLS: dict[str, type[nn.GRUCell] | type[nn.LSTMCell] | type[nn.RNNCell]] = {
    "GRU": nn.GRUCell,
    "LSTM": nn.LSTMCell,
    "RNN_TANH": nn.RNNCell,
}


class CellLoop(nn.Module):
    """A fused recurrent layer's stand-in: the same computation as a Python loop over torch's cell."""

    def __init__(self, layer: nn.RNNBase, compiled: bool = False):
        super().__init__()
        cell = _CELLS[layer.mode](layer.input_size, layer.hidden_size).to(next(layer.parameters()))
        cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.state_dict().items()})
        # Not Module.compile: of torch's own modules it compiles nothing, without a word.
        self.cell = torch.compile(cell) if compiled else cell

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs (B, T, H) for inputs ``x`` (B, T, I), and the final states (parts, B, H)."""
        parts = None if state is None else tuple(state)
        outputs = []
        for step in x.unbind(1):
            h = self.cell(step, parts if parts is None or len(parts) > 1 else parts[0])
            parts = h if isinstance(h, tuple) else (h,)
            outputs.append(parts[0])
        return torch.stack(outputs, 1), torch.stack(parts or ())


def replace_layers(model: nn.Module, loop: Callable[[nn.RNNBase], nn.Module]) -> None:
    """Put what ``loop`` returns in the place of each of the model's fused recurrent layers."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.RNNBase):
            model.set_submodule(path, loop(layer))
