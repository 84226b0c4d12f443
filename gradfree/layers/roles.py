"""Layers that can be taken apart: linear maps, with weights and without, and functions of single elements."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
    """What is known of the layers of one class; see :func:`register_layer`."""

    role: Role
    linear: Callable[..., Tensor] | None = None
    adjoint: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
    isometric: bool = False


_KNOWN: dict[type[nn.Module], _Known] = {}


def register_layer(
    kind: type[nn.Module],
    role: str,
    *,
    linear: Callable[..., Tensor] | None = None,
    adjoint: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    isometric: bool = False,
) -> None:
    """Let engines that take layers apart (``foton``, ``dfa``, ``pepita``) know what a class of layers does.

    For the layers of this class, and of subclasses that keep its ``forward``. They take one tensor, the samples along
    its first dimension, and treat every sample by itself. What a layer's role asks of it:

    - "weights": trained, and linear but for a bias: ``forward(x)`` is ``linear(layer, x, layer.weight)`` plus what does
      not depend on ``x``. ``linear`` is required. ``layer.weight`` (outputs, inputs...) may be computed; engines put
      tensors of their own, of its shape, in its place. A parameter of two dimensions is the matrix W of x Wᵀ, and kept
      orthogonal by engines that do so.
    - "linear": without trained weights and without a bias.
    - "pointwise": of each element by itself, without parameters; works in any precision and, for
      ``foton(perturbation="tangent")``, under ``torch.func.jvp``.
    - "dropout": each element times a random number, which torch's global generator draws.
    - "max": a choice of elements. ``linear(layer, x)``, required, is its linear stand-in on the way to the input, such
      as the mean.

    Args:
        kind: the class; what is known of it already is replaced.
        role: one of these names.
        linear: see above; for "weights" and "max" alone.
        adjoint: ``adjoint(layer, cotangent, weight)`` is the transpose of ``linear`` times a cotangent, for "weights"
            alone; found by autograd where left out.
        isometric: whether the layer keeps norms, of "pointwise" ones near zero (f(0) = 0, f'(0) = 1, smooth): ``foton``
            notes for all others what its gradients lose there.

    Raises:
        ValueError: an unknown role.
        TypeError: not a class of modules; a function that the role asks for is missing, or it has no use for one.
    """
    names = {r.name.lower(): r for r in Role}
    if role not in names:
        raise ValueError(no_such("role", role, names))
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register_layer takes a class of modules, not {kind!r}.")
    known = _Known(names[role], linear, adjoint, isometric)
    if (linear is None) == (known.role in (Role.WEIGHTS, Role.MAX)):
        needs = "has no use for a function" if linear else "needs the function"
        raise TypeError(f"{kind.__name__}: the role {role!r} {needs} 'linear'.")
    if adjoint and known.role is not Role.WEIGHTS:
        raise TypeError(f"{kind.__name__}: the role {role!r} has no use for a function 'adjoint'.")
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
"""Torch's own layers that ask for no function: role, whether they are isometric, classes."""

register_layer(nn.Linear, "weights", linear=lambda _, x, w: F.linear(x, w), adjoint=lambda _, e, w: e @ w)
_kind: type[nn.Module]
for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_layer(_kind, "weights", linear=_convolved)
for _role, _isometric, _kinds in _PLAIN:
    for _kind in _kinds:
        register_layer(_kind, _role, isometric=_isometric)
for _kind, _mean in ((nn.MaxPool1d, F.avg_pool1d), (nn.MaxPool2d, F.avg_pool2d), (nn.MaxPool3d, F.avg_pool3d)):
    register_layer(_kind, "max", linear=_mean_pool(_mean))


def _known(module: nn.Module) -> _Known | None:
    """Return what is known of the first of the module's classes that is known, if the module keeps its forward."""
    if "forward" in vars(module) or (isinstance(module, _MaxPoolNd) and (module.return_indices or _dilated(module))):
        return None
    forward = type(module).forward
    return next((_KNOWN[c] for c in type(module).__mro__ if c in _KNOWN and c.forward is forward), None)


def _dilated(pool: nn.Module) -> bool:
    return pool.dilation not in (1, (1,), (1, 1), (1, 1, 1))


def role_of(module: nn.Module) -> Role | None:
    """Return what ``module`` does; ``None`` if that is not known. Subclasses count if they keep the known forward."""
    known = _known(module)
    return known.role if known else None


def is_isometric(module: nn.Module) -> bool:
    """Return whether ``module`` is known to keep norms; functions of single elements, whether they do near zero."""
    known = _known(module)
    return known is not None and known.isometric


def known_layers() -> str:
    """Return the classes of known layers, for messages: all but those that gradfree's own models bring with them."""
    return ", ".join(kind.__name__ for kind in _KNOWN if kind.__module__.partition(".")[0] != "gradfree")


def has_own_weight(module: nn.Module) -> bool:
    """Return whether the weight is a parameter, not computed from others (``torch.nn.utils.parametrize``)."""
    return "weight" in module._parameters


def keeps_state(module: nn.Module) -> bool:
    """Return whether running the layer changes it: it has submodules with buffers, or with parameters they set."""
    if not module._modules:
        return False
    inner = [child for child in module.modules() if child is not module]
    return any(not p.requires_grad for child in inner for p in child.parameters()) or any(
        True for child in inner for _ in child.buffers()
    )


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear map as it is now; one that is computed with a state is computed on a copy.

    Such as the vectors of a power iteration, which are the forward pass's to change. Torch's older ``weight_norm`` and
    ``spectral_norm`` compute it before each pass and leave it as an attribute.
    """
    stays = has_own_weight(module) or "weight" in vars(module) or not keeps_state(module)
    with torch.no_grad():
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
        cotangent: shaped like the layer's output, (N, ...); N is free.
        shape: of the layer's input; the first dimension does not count.
        weight: to use instead of the layer's own.

    Returns:
        Of ``shape`` but for the first dimension, which is the cotangent's.
    """
    known = _known(module)
    if known is not None and known.adjoint is not None:
        return known.adjoint(module, *_promoted(cotangent, weight_of(module) if weight is None else weight))
    with torch.enable_grad():
        x = cotangent.new_zeros((len(cotangent), *shape[1:])).requires_grad_()
        out = linear_part(module, x, weight)
    return torch.autograd.grad(out, x, cotangent.to(out.dtype))[0]
