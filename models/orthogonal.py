"""Networks with orthogonal weights whose layers do not expand, so that a forward pass keeps the error signal.

Each has its layers in one ``nn.Sequential``, where the engines for single layers (``foton`` and its baselines) find
them. None has pooling or padding: convolutions have kernel = stride, so that the weight is an orthogonal matrix for
each patch. None has biases, as in the FOTON paper (arXiv 2512.20668). Biases push activations out of the range where
tanh is nearly linear, and cost FOTON about ten points of accuracy at 50 layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from gradfree.layers.roles import register_layer


class Abs(nn.Module):
    """|x|, which preserves the norm of every state."""

    def forward(self, x: Tensor) -> Tensor:
        """Return |x|."""
        return x.abs()


class GroupSort(nn.Module):
    """Sorts pairs of channels, which preserves norms of states and gradients (MaxMin, Anil et al. 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, (B, channels, ...), with the larger of each pair first."""
        a, b = x.unflatten(1, (-1, 2)).unbind(2)
        return torch.stack([torch.maximum(a, b), torch.minimum(a, b)], 2).flatten(1, 2)


register_layer(Abs, "pointwise")
# In FOTON's linear pass the order of a pair does not matter, so pairs stay unsorted.
register_layer(GroupSort, "max", linear=lambda _, x: x)

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "abs": Abs,
    "groupsort": GroupSort,
    "identity": nn.Identity,
}


class _Orthogonal(nn.Module):
    """``layers`` with orthogonal weights, and ``activation`` after each but the last."""

    def __init__(self, layers: Sequence[nn.Module], activation: str, dropout: float):
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(map(repr, _ACTIVATIONS))}, not {activation!r}.")
        *hidden, last = layers
        self.layers = nn.Sequential()
        for layer in hidden:
            self.layers.append(layer)
            if isinstance(layer, nn.Linear | nn.Conv2d):
                self.layers.append(_ACTIVATIONS[activation]())
                if dropout:
                    self.layers.append(nn.Dropout(dropout))
        self.layers.append(last)
        for layer in self.layers:
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.orthogonal_(layer.weight)


class OrthogonalMLP(_Orthogonal):
    """Multilayer perceptron of any depth whose hidden layers all have the same width.

    Args:
        in_features: number of features of a flattened input.
        num_classes: number of classes.
        depth: number of hidden layers, without the linear output layer.
        width: width of the hidden layers; ``in_features`` by default.
        activation: "tanh", "relu", "abs", "groupsort" (for even widths) or "identity".
        dropout: rate after each activation.

    Raises:
        ValueError: ``width`` above ``in_features``, ``depth`` below 1 or an unknown activation.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        depth: int = 10,
        width: int | None = None,
        activation: str = "tanh",
        dropout: float = 0.0,
    ):
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}.")
        width = in_features if width is None else width
        _check_layer("width", width, "in_features", in_features)
        widths = [in_features, *[width] * depth, num_classes]
        super().__init__([nn.Linear(a, b, bias=False) for a, b in pairwise(widths)], activation, dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, num_classes) for ``inputs`` (B, ...), flattened to (B, in_features)."""
        return self.layers(inputs.flatten(1))


class OrthogonalLeNet(_Orthogonal):
    """LeNet-5 as an orthogonal network: with 2×2 patches instead of 5×5 windows and pooling.

    LeCun et al. 1998, "Gradient-based learning applied to document recognition": 6 channels at half the resolution
    (4 for one input channel, whose patches have 4 elements), 16 at a quarter, then layers of 120, 84 and
    ``num_classes``.

    Args:
        in_channels: number of image channels.
        num_classes: number of classes.
        image_size: height and width of the images, a multiple of 4, at least 12.
        activation: "tanh", "relu", "abs", "groupsort" (for even widths) or "identity".
        dropout: rate after each activation.

    Raises:
        ValueError: an ``image_size`` that does not fit, or an unknown activation.
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int = 28,
        activation: str = "tanh",
        dropout: float = 0.0,
    ):
        features = 16 * _after(image_size, stages=2) ** 2
        _check_layer(
            "the first dense layer", 120, f"the last convolution's output for image_size={image_size}", features
        )
        channels = min(6, 4 * in_channels)
        layers = [
            nn.Conv2d(in_channels, channels, 2, stride=2, bias=False),
            nn.Conv2d(channels, 16, 2, stride=2, bias=False),
            nn.Flatten(),
            *(nn.Linear(a, b, bias=False) for a, b in pairwise((features, 120, 84, num_classes))),
        ]
        super().__init__(layers, activation, dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes) for ``images`` (B, in_channels, image_size, image_size)."""
        return self.layers(images)


class OrthogonalConvNet(_Orthogonal):
    """All-convolutional network: each stage halves the resolution by 2×2 patches, then has 1×1 convolutions.

    The default channels keep the number of elements: 3×32×32, 12×16×16, 48×8×8 and 192×4×4 are equally many.

    Args:
        in_channels: number of image channels.
        num_classes: number of classes.
        image_size: height and width of the images, a multiple of 2 ** number of stages.
        channels: channels of each stage.
        stage_depth: number of convolutions in a stage.
        activation: "tanh", "relu", "abs", "groupsort" (for even widths) or "identity".
        dropout: rate after each activation.

    Raises:
        ValueError: more ``channels`` than four times those before, an ``image_size`` that does not fit, a
            ``stage_depth`` below 1 or an unknown activation.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int = 32,
        channels: Sequence[int] = (12, 48, 192),
        stage_depth: int = 2,
        activation: str = "tanh",
        dropout: float = 0.0,
    ):
        if stage_depth < 1:
            raise ValueError(f"stage_depth must be at least 1, not {stage_depth}.")
        layers: list[nn.Module] = []
        before = in_channels
        for own in channels:
            _check_layer("a stage's channels", own, f"4 times the {before} before", 4 * before)
            layers.append(nn.Conv2d(before, own, 2, stride=2, bias=False))
            layers += [nn.Conv2d(own, own, 1, bias=False) for _ in range(stage_depth - 1)]
            before = own
        features = before * _after(image_size, stages=len(channels)) ** 2
        super().__init__([*layers, nn.Flatten(), nn.Linear(features, num_classes, bias=False)], activation, dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes) for ``images`` (B, in_channels, image_size, image_size)."""
        return self.layers(images)


def _check_layer(what: str, outputs: int, source: str, inputs: int) -> None:
    """Raise if a layer expands."""
    if not 1 <= outputs <= inputs:
        raise ValueError(
            f"{what} must be from 1 to {source}, {inputs}, not {outputs}: a layer with more outputs than inputs has "
            "no orthonormal rows, so FOTON would lose a part of all gradients after it."
        )


def _after(size: int, stages: int) -> int:
    """Return the height and width after ``stages`` halvings; raise if they are not even each time."""
    if size < 1 or size % 2**stages:
        raise ValueError(f"image_size must be a multiple of {2**stages}, not {size}: each stage takes 2×2 patches.")
    return size // 2**stages
