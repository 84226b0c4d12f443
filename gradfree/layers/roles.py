"""Known layers and their roles: linear maps, with weights or without, and elementwise functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.pooling import _MaxPoolNd

from gradfree.wording import no_such

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class Role(Enum):
    """What a layer does to its input."""

    WEIGHTS = "a linear map with trained weights, and a bias"
    LINEAR = "a fixed linear map"
    POINTWISE = "a function of each element by itself"
    DROPOUT = "a random mask"
    MAX = "a choice of elements"


@dataclass(frozen=True)
class _Known:
    """The role and functions of one class of layers; see :func:`register_layer`.

    Attributes:
        adjoint: maps a cotangent and a weight to the transpose of ``linear``; ``None``: autograd computes it.
    """

    role: Role
    linear: Callable[..., Tensor] | None = None
    isometric: bool = False
    adjoint: Callable[[Tensor, Tensor], Tensor] | None = None


_KNOWN: dict[type[nn.Module], _Known] = {}


def register_layer(
    kind: type[nn.Module],
    role: str,
    *,
    linear: Callable[..., Tensor] | None = None,
    isometric: bool = False,
) -> None:
    """Register what a class of layers computes, for engines on known layers (``foton``, ``dfa``, ``pepita``).

    This holds for the class and for subclasses that keep its ``forward``. The layers take one tensor, with the samples
    in its first dimension, and must not mix samples. The roles:

    - "weights": trained, and linear except for a bias: ``forward(x)`` is ``linear(layer, x, layer.weight)`` plus a term
      that does not depend on ``x``. ``linear`` is required. ``layer.weight`` (outputs, inputs...) may be computed;
      engines pass other tensors of its shape to ``linear``. A parameter of two dimensions is the matrix W of x Wᵀ;
      some engines keep it orthogonal.
    - "linear": without trained weights and without a bias.
    - "pointwise": an elementwise function without parameters. It must work in any precision and, for
      ``foton(perturbation="tangent")``, under ``torch.func.jvp``.
    - "dropout": multiplies each element by a random number from torch's global generator.
    - "max": selects elements. ``linear(layer, x)`` is required: a linear function such as the mean, which replaces the
      layer when an error is sent back to the input.

    Args:
        kind: the class; an earlier registration is replaced.
        role: one of these names.
        linear: see above; only for "weights" and "max".
        isometric: whether the layer keeps norms; for "pointwise" layers, near zero (f(0) = 0, f'(0) = 1, smooth).
            ``foton`` reports for all other layers what its gradients lose there.

    Raises:
        ValueError: an unknown role.
        TypeError: not a class of modules; or a function that the role needs is missing, or one that it does not use is
            given.
    """
    names = {r.name.lower(): r for r in Role}
    if role not in names:
        raise ValueError(no_such("role", role, names))
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register_layer takes a class of modules, not {kind!r}.")
    known = _Known(names[role], linear, isometric)
    if (linear is None) == (known.role in (Role.WEIGHTS, Role.MAX)):
        needs = "does not use a function" if linear else "needs the function"
        raise TypeError(f"{kind.__name__}: the role {role!r} {needs} 'linear'.")
    _KNOWN[kind] = known


def _mean_pool(mean: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda pool, x: mean(x, pool.kernel_size, pool.stride, pool.padding, pool.ceil_mode)


def _convolved(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    return layer._conv_forward(x, weight, None)


_PLAIN: tuple[tuple[str, bool, tuple[type[nn.Module], ...]], ...] = (
    ("linear", True, (nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle)),
    ("linear", False, (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)),
    ("linear", False, (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)),
    ("linear", False, (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)),
    ("linear", True, (nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d)),
    ("pointwise", True, (nn.Tanh, nn.Hardtanh, nn.Softsign)),
    ("pointwise", False, (nn.Sigmoid, nn.Hardsigmoid, nn.Tanhshrink, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU)),
    ("pointwise", False, (nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus)),
    ("dropout", False, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)),
)
"""Torch's layers that need no ``linear``: role, whether they are isometric, classes."""

_KNOWN[nn.Linear] = _Known(Role.WEIGHTS, lambda _, x, w: F.linear(x, w), adjoint=torch.matmul)
_kind: type[nn.Module]
for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_layer(_kind, "weights", linear=_convolved)
for _role, _isometric, _kinds in _PLAIN:
    for _kind in _kinds:
        register_layer(_kind, _role, isometric=_isometric)
for _kind, _mean in ((nn.MaxPool1d, F.avg_pool1d), (nn.MaxPool2d, F.avg_pool2d), (nn.MaxPool3d, F.avg_pool3d)):
    register_layer(_kind, "max", linear=_mean_pool(_mean))


def _known(module: nn.Module) -> _Known | None:
    """Return the registration of the module's class or nearest base class with the same ``forward``."""
    if "forward" in vars(module) or (isinstance(module, _MaxPoolNd) and (module.return_indices or _dilated(module))):
        return None
    forward = type(module).forward
    known = next((_KNOWN[c] for c in type(module).__mro__ if c in _KNOWN and c.forward is forward), None)
    return None if known and known.role is not Role.DROPOUT and contains_dropout(module) else known


def contains_dropout(module: nn.Module) -> bool:
    """Return whether dropout is inside the layer, such as on its weight, which would be another one if read again."""
    return any(isinstance(inner, _DropoutNd) for inner in module.modules() if inner is not module)


def _dilated(pool: nn.Module) -> bool:
    return pool.dilation not in (1, (1,), (1, 1), (1, 1, 1))


def role_of(module: nn.Module) -> Role | None:
    """Return the role of ``module``; ``None`` if its class is not known. See :func:`register_layer` for subclasses."""
    known = _known(module)
    return known.role if known else None


def is_isometric(module: nn.Module) -> bool:
    """Return whether ``module`` is known to keep norms; for elementwise functions, near zero."""
    known = _known(module)
    return known is not None and known.isometric


def known_layers() -> str:
    """Return the names of the known classes for messages, without those of gradfree's own models."""
    return ", ".join(kind.__name__ for kind in _KNOWN if kind.__module__.partition(".")[0] != "gradfree")


def has_own_weight(module: nn.Module) -> bool:
    """Return whether the weight is a parameter, and not computed (``torch.nn.utils.parametrize``)."""
    return "weight" in module._parameters


def keeps_state(module: nn.Module) -> bool:
    """Return whether running the layer may change it: it has submodules with buffers or frozen parameters."""
    if not module._modules:
        return False
    inner = [child for child in module.modules() if child is not module]
    return any(not p.requires_grad for child in inner for p in child.parameters()) or any(
        True for child in inner for _ in child.buffers()
    )


def weight_of(module: nn.Module) -> Tensor:
    """Return the current weight of a linear map, without changing the layer.

    A computed weight may have a state, such as the vectors of a power iteration, which only the forward pass may
    change. Such a weight is computed on a copy. Torch's older ``weight_norm`` and ``spectral_norm`` compute the weight
    before each pass and store it as an attribute.
    """
    readable = has_own_weight(module) or "weight" in vars(module) or not keeps_state(module)
    with torch.no_grad():
        weight: Tensor = (module if readable else copy.deepcopy(module)).weight  # type: ignore[assignment]
        return weight.detach()


def _promoted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def linear_part(module: nn.Module, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the linear part of ``module``, of role WEIGHTS, LINEAR or MAX, applied to ``x``; without the bias.

    A maximum over elements is replaced by its registered linear function, such as their mean.

    Args:
        module: the layer.
        x: an input of the layer.
        weight: replaces the layer's weight; of the same shape.
    """
    known = _known(module)
    assert known is not None
    if known.linear is None:
        return module.forward(x)
    if known.role is Role.MAX:
        return known.linear(module, x)
    return known.linear(module, *_promoted(x, weight_of(module) if weight is None else weight))


def adjoint(module: nn.Module, cotangent: Tensor, shape: torch.Size, weight: Tensor | None = None) -> Tensor:
    """Return the transpose of :func:`linear_part` times ``cotangent``.

    Args:
        module: the layer.
        cotangent: shaped like the layer's output, (N, ...), with any N.
        shape: of the layer's input; the first dimension is ignored.
        weight: replaces the layer's weight.

    Returns:
        A tensor of ``shape``, except that the first dimension is N.
    """
    known = _known(module)
    if known is not None and known.adjoint is not None:
        return known.adjoint(*_promoted(cotangent, weight_of(module) if weight is None else weight))
    with torch.enable_grad():
        x = cotangent.new_zeros((len(cotangent), *shape[1:])).requires_grad_()
        out = linear_part(module, x, weight)
    return torch.autograd.grad(out, x, cotangent.to(out.dtype))[0]
