"""When sending an error forward through layers equals backpropagation, and what is lost where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from torch import nn

from gradfree.layers.roles import Convolution, Role, has_own_weight, is_isometric, role_of, weight_of
from gradfree.orthogonal.weights import drift, is_matrix

_TOLERANCE = 1e-3


def losses(layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield, layer by layer, which condition of exactness does not hold, and what that costs.

    Exact are linear layers with orthonormal rows, which therefore do not expand (FOTON, arXiv 2512.20668; in place of
    backpropagation's δ stands A Aᵀ δ, A the product of the linear parts so far). The last layer with weights is exact
    whatever its weights are.

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
            f"expands, {features[0]} to {features[1]}: its gradients and those of all later layers lose what lies "
            "outside the image of the layers so far. Use no more outputs than inputs (for convolutions, times the "
            "stride's)."
        )
    if isinstance(layer, Convolution) and not is_matrix(layer):
        if any(_padding(layer)) and layer.padding_mode != "circular":
            return f"pads with {layer.padding_mode}, which no kernel is orthogonal under: use padding_mode='circular'."
        if has_own_weight(layer):
            return (
                "has overlapping windows and a plain weight, which is not kept orthogonal: gradients are multiplied "
                "by A Aᵀ. Use kernel = stride, or a parametrisation such as orthogonium's AdaptiveOrthoConv2d."
            )
        return None
    if is_matrix(layer) and (off := float(drift([layer.weight])[0])) > _TOLERANCE:  # type: ignore[list-item]
        return (
            f"has no orthonormal rows yet, ‖W Wᵀ - I‖ = {off:.1e}: gradients are multiplied by A Aᵀ. Call "
            "gradfree.orthogonalize(model) before training; a later step would move the weights."
        )
    return None


def _of_rest(layer: nn.Module) -> str | None:
    if role_of(layer) is Role.MAX:
        return "chooses elements: the feedback has a linear stand-in for that. To pool, use averages or strides."
    if is_isometric(layer):
        return None
    if role_of(layer) is Role.LINEAR:
        return "is no isometry: it changes the norm of later layers' gradients, not their direction."
    if role_of(layer) is Role.POINTWISE:
        return (
            "is far from linear at zero: each such layer takes some of the gradients' alignment with it, and in deep "
            "chains all. Use Tanh."
        )
    return None


def _features(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs, of convolutions for the window of one step."""
    if isinstance(layer, Convolution):
        return layer.in_channels * prod(layer.stride), layer.out_channels
    weight = weight_of(layer)
    return weight[0].numel(), len(weight)


def _padding(layer: Convolution) -> tuple[int, ...]:
    if isinstance(layer.padding, str):
        return tuple(layer._reversed_padding_repeated_twice)
    return tuple(layer.padding)
