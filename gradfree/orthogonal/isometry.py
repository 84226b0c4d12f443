"""Checks for which layers FOTON's gradients equal those of backpropagation, and what is lost for others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from torch import nn

from gradfree.layers.roles import Convolution, Role, has_own_weight, is_isometric, role_of, weight_of
from gradfree.orthogonal.weights import drift, is_matrix

_TOLERANCE = 1e-3


def inexact_layers(layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield, for each layer with inexact gradients, the reason and the effect.

    FOTON (arXiv 2512.20668) has A Aᵀ δ in place of δ, where A is the product of the linear parts so far. So gradients
    are exact for linear layers with orthonormal rows, which cannot have more outputs than inputs. The last layer with
    weights always has exact gradients.

    Args:
        layers: by module path, in order.
    """
    weighted = [path for path, layer in layers.items() if role_of(layer) is Role.WEIGHTS]
    for path, layer in layers.items():
        if weighted and path != weighted[-1]:
            what = _of_weights(layer) if role_of(layer) is Role.WEIGHTS else _of_rest(layer)
            if what:
                yield f"{path} ({type(layer).__name__}) {what}"


def _of_weights(layer: nn.Module) -> str | None:
    features = _features(layer)
    if features[1] > features[0]:
        return (
            f"expands, {features[0]} to {features[1]}: its gradients and those of all later layers lose the part "
            "outside the image of the layers so far. Use no more outputs than inputs (for convolutions, times the "
            "stride's)."
        )
    if isinstance(layer, Convolution) and not is_matrix(layer):
        if not has_own_weight(layer):
            return None
        return (
            "has overlapping windows and a plain weight, which is not kept orthogonal: gradients are multiplied by "
            "A Aᵀ. Use kernel = stride, or circular padding and a parametrisation such as orthogonium's "
            "AdaptiveOrthoConv2d."
        )
    weight = weight_of(layer)
    if weight.is_meta or weight.is_complex():
        return None
    if is_matrix(layer) and (off := float(drift([weight])[0])) > _TOLERANCE:
        return (
            f"has no orthonormal rows yet, ‖W Wᵀ - I‖ = {off:.1e}: gradients are multiplied by A Aᵀ. Call "
            "gradfree.orthogonalize(model) before training; a later step would move the weights."
        )
    return None


def _of_rest(layer: nn.Module) -> str | None:
    if role_of(layer) is Role.MAX:
        return "selects elements: the feedback uses a linear function instead. Pool with averages or strides."
    if is_isometric(layer):
        return None
    if role_of(layer) is Role.LINEAR:
        return "does not keep norms: it changes the norm of later layers' gradients, not their direction."
    if role_of(layer) is Role.POINTWISE:
        return (
            "is far from linear at zero: each such layer reduces the gradients' alignment, in deep chains to nothing. "
            "Use Tanh."
        )
    return None


def _features(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs; for convolutions, those of one window without overlap."""
    if isinstance(layer, Convolution):
        return layer.in_channels * prod(layer.stride), layer.out_channels
    weight = weight_of(layer)
    return weight[0].numel(), len(weight)
