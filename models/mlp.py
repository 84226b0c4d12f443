"""A plain multilayer perceptron, on which learning rules are often compared."""

from __future__ import annotations

from torch import Tensor, nn


class MLP(nn.Module):
    """Multilayer perceptron with ReLUs. All layers are in one ``nn.Sequential``, as engines for single layers need.

    Args:
        in_features: number of features of a flattened input.
        num_classes: number of classes.
        depth: number of hidden layers.
        width: width of the hidden layers.
    """

    def __init__(self, in_features: int, num_classes: int, depth: int = 3, width: int = 256):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(in_features, width), nn.ReLU())
        for _ in range(depth - 1):
            self.layers.extend([nn.Linear(width, width), nn.ReLU()])
        self.layers.append(nn.Linear(width, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, num_classes) for ``inputs`` (B, ...), flattened to (B, in_features)."""
        return self.layers(inputs.flatten(1))
