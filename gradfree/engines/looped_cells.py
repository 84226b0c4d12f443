"""Cells that a model calls step by step: they are no chains, and the message says which layer to use instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from gradfree.chains.report import path_name
from gradfree.chains.site import Site
from gradfree.time.cell_layer import CellLayer, ElementwiseCell

_LAYERS: dict[type[nn.Module], str] = {nn.GRUCell: "nn.GRU", nn.LSTMCell: "nn.LSTM", nn.RNNCell: "nn.RNN"}


def looped_cells(modules: Mapping[str, nn.Module], kinds: Sequence[type[Site]]) -> Iterator[str]:
    """Yield a problem for each of ``modules``, by path, that is a cell, if chains in time are among ``kinds``."""
    if any(kind.dimension == "time" for kind in kinds):
        for path, module in modules.items():
            if _is_cell(module):
                yield (
                    f"{path_name(path)} is of class {type(module).__name__}, a cell that is called step by step, which "
                    f"is no chain. Give all steps to a layer: gradfree.CellLayer(cell){_torch_layer(module)}."
                )


def _is_cell(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNCellBase | ElementwiseCell):
        return True
    if isinstance(module, nn.RNNBase | CellLayer) or not isinstance(getattr(module, "hidden_size", None), int):
        return False
    _, *taken = inspect.signature(type(module).forward).parameters.values()
    return len(taken) == 2 and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in taken)


def _torch_layer(cell: nn.Module) -> str:
    """Return how to make torch's layer of one of its cells, with the same weights; "" for other cells."""
    if not isinstance(cell, nn.RNNCellBase) or type(cell) not in _LAYERS:
        return ""
    options = "" if cell.bias else ", bias=False"
    if isinstance(cell, nn.RNNCell) and cell.nonlinearity != "tanh":
        options += f", nonlinearity={cell.nonlinearity!r}"
    layer = f"{_LAYERS[type(cell)]}({cell.input_size}, {cell.hidden_size}{options})"
    return f", or layer = {layer}, with layer.load_state_dict({{f'{{n}}_l0': p for n, p in cell.state_dict().items()}})"
