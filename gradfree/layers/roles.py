"""Layers that can be taken apart: linear maps, with weights and without, and functions of single elements."""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class Role(Enum):
    """What a layer does to its input."""

    WEIGHTS = "a linear map with trained weights, and a bias"
    LINEAR = "a fixed linear map"
    POINTWISE = "a function of each element by itself"
    DROPOUT = "a random mask"
    MAX = "a choice of elements"


_CLASSES: dict[Role, tuple[type[nn.Module], ...]] = {
    Role.WEIGHTS: (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    Role.LINEAR: (
        *(nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle),
        *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    ),
    Role.POINTWISE: (
        *(nn.Tanh, nn.Hardtanh, nn.Softsign, nn.Sigmoid, nn.Hardsigmoid, nn.Tanhshrink),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    ),
    Role.DROPOUT: (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    Role.MAX: (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
}
_AVERAGES: dict[type[nn.Module], Any] = {
    nn.MaxPool1d: F.avg_pool1d,
    nn.MaxPool2d: F.avg_pool2d,
    nn.MaxPool3d: F.avg_pool3d,
}


def role_of(module: nn.Module) -> Role | None:
    """Return what ``module`` does; ``None`` if that is not known. Subclasses count if they keep torch's forward."""
    if getattr(module, "return_indices", False) or (isinstance(module, tuple(_AVERAGES)) and _dilated(module)):
        return None
    if "forward" in vars(module):
        return None
    for role, classes in _CLASSES.items():
        for kind in classes:
            if isinstance(module, kind) and type(module).forward is kind.forward:
                return role
    return None


def _dilated(pool: nn.Module) -> bool:
    return pool.dilation not in (1, (1,), (1, 1), (1, 1, 1))


def known_layers() -> str:
    """Return the classes of all known layers, for messages."""
    return ", ".join(kind.__name__ for classes in _CLASSES.values() for kind in classes)


def has_own_weight(module: nn.Module) -> bool:
    """Tell whether the weight is a parameter, not computed from others (``torch.nn.utils.parametrize``)."""
    return "weight" in module._parameters


def keeps_state(module: nn.Module) -> bool:
    """Tell whether running the layer changes it: it has submodules with buffers, or with parameters they set."""
    inner = [child for child in module.modules() if child is not module]
    return any(not p.requires_grad for child in inner for p in child.parameters()) or any(
        True for child in inner for _ in child.buffers()
    )


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear map as it is now; one that is computed is computed on a copy.

    A parametrisation may keep state, such as the vectors of a power iteration, that is the forward pass's to change.
    Torch's older ``weight_norm`` and ``spectral_norm`` compute it before each pass and leave it as an attribute.
    """
    stays = has_own_weight(module) or "weight" in vars(module)
    weight: Tensor = (module if stays else copy.deepcopy(module)).weight  # type: ignore[assignment]
    return weight.detach()


def _promoted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def linear_part(module: nn.Module, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return what ``module``, of role WEIGHTS, LINEAR or MAX, makes of ``x``, without its bias.

    For a maximum over elements that is their mean, its linear stand-in.

    Args:
        module: the layer.
        x: as the layer takes it.
        weight: to use instead of the layer's own, shaped like it.
    """
    if isinstance(module, nn.Linear | Convolution):
        x, weight = _promoted(x, weight_of(module) if weight is None else weight)
        return F.linear(x, weight) if isinstance(module, nn.Linear) else module._conv_forward(x, weight, None)
    if isinstance(module, tuple(_AVERAGES)):
        pool = next(pool for kind, pool in _AVERAGES.items() if isinstance(module, kind))
        return pool(x, module.kernel_size, module.stride, module.padding, module.ceil_mode)
    return module.forward(x)


def adjoint(module: nn.Module, cotangent: Tensor, shape: torch.Size, weight: Tensor | None = None) -> Tensor:
    """Return the transpose of :func:`linear_part` times ``cotangent``.

    Args:
        module: the layer.
        cotangent: shaped like the layer's output, (N, ...); N is free.
        shape: of the layer's input; the first dimension does not count.
        weight: to use instead of the layer's own.

    Returns:
        Of ``shape`` but for the first dimension, which is the cotangent's.
    """
    if isinstance(module, nn.Linear):
        cotangent, weight = _promoted(cotangent, weight_of(module) if weight is None else weight)
        return cotangent @ weight
    with torch.enable_grad():
        x = cotangent.new_zeros((len(cotangent), *shape[1:])).requires_grad_()
        out = linear_part(module, x, weight)
    return torch.autograd.grad(out, x, cotangent.to(out.dtype))[0]
