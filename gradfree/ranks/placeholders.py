"""Placeholders for the parts of a model that other ranks hold: NaN for weights, an early exit for blocks.

A rank runs the model's forward from the start, so that masks and other inputs of its blocks are computed. Results of
absent weights are NaN, and must not be used; a first pass checks that. After its last block the rank leaves the model's
forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn

from gradfree.torchside.graph import walk


class EarlyExit(BaseException):
    """Leaves the model's forward after the rank's last block. A BaseException, so that models do not catch it."""


def placeholder(tensor: Tensor) -> Tensor:
    """Return NaN in the shape of ``tensor``, without memory; a leaf of autograd's graph, so that its use is found."""
    number = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return tensor.detach().new_full((), number).expand(tensor.shape).requires_grad_(tensor.requires_grad)


def remove_absent(model: nn.Module, held: Collection[int], elsewhere: Iterable[nn.Module]) -> dict[int, str]:
    """Replace the parameters of other ranks by placeholders, and remove the buffers of blocks on other ranks.

    Args:
        model: changed in place.
        held: the ids of the parameters that stay.
        elsewhere: the modules of the blocks on other ranks, which never run here.

    Returns:
        The names of the removed parameters, by the ids of their placeholders.
    """
    names: dict[int, str] = {}
    placeholders: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) in held:
                continue
            nan = placeholders.setdefault(id(parameter), placeholder(parameter))
            # A plain attribute, which is in neither parameters() nor state_dict().
            del module._parameters[name]
            setattr(module, name, nan)
            names[id(nan)] = f"{path}.{name}" if path else name
    for module in elsewhere:
        for name in module._buffers:
            module._buffers[name] = None
    return names


def absent_weight(tensors: Iterable[Tensor], names: Mapping[int, str]) -> str | None:
    """Return the name of an absent weight that ``tensors`` depend on; ``names`` are those of :func:`remove_absent`."""
    leaves = walk(tensor for tensor in tensors if tensor.requires_grad).leaves
    return next((names[id(leaf)] for leaf in leaves if id(leaf) in names), None)
