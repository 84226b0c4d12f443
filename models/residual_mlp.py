"""A residual multilayer perceptron."""

from __future__ import annotations

from torch import Tensor, nn


class ResidualMLPBlock(nn.Module):
    """x + MLP(LN(x)) with one hidden layer."""

    def __init__(self, width: int, expansion: int, dropout: float):
        super().__init__()
        self.branch = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, expansion * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(expansion * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state, shaped as ``x``, (B, width)."""
        return x + self.branch(x)


class ResidualMLP(nn.Module):
    """Residual multilayer perceptron: linear stem, pre-LN residual blocks, linear head.

    Args:
        in_features: number of features of a flattened input.
        num_classes: number of classes.
        depth: number of blocks.
        width: width of the residual stream.
        expansion: a block's hidden width as a multiple of ``width``.
        dropout: rate on a block's hidden layer.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        depth: int = 8,
        width: int = 128,
        expansion: int = 2,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.stem = nn.Linear(in_features, width)
        self.blocks = nn.Sequential(*(ResidualMLPBlock(width, expansion, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, num_classes) for ``inputs`` (B, ...), flattened to (B, in_features)."""
        return self.head(self.norm(self.blocks(self.stem(inputs.flatten(1)))))
