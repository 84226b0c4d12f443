"""A pre-LN vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradfree.models.gpt import sublayers


class ViT(nn.Module):
    """Vision transformer; each layer is two links of the chain, attention and MLP.

    Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021, arXiv 2010.11929. Uses the mean over patches instead
    of a class token, as in its appendix D.3.

    Args:
        in_channels: number of image channels.
        num_classes: number of classes.
        image_size: height and width of the images in pixels.
        patch_size: height and width of a patch in pixels; must divide ``image_size``.
        layers: number of layers, of two sublayers each.
        width: width of the residual stream.
        heads: number of attention heads; must divide ``width``.
        dropout: rate on attention weights, sublayer outputs and embeddings.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int = 32,
        patch_size: int = 4,
        layers: int = 6,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
    ):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"patch_size must divide image_size, but {image_size} is no multiple of {patch_size}.")
        self.patches = nn.Conv2d(in_channels, width, patch_size, patch_size)
        self.positions = nn.Parameter(0.02 * torch.randn((image_size // patch_size) ** 2, width))
        self.dropout = nn.Dropout(dropout)
        self.sublayers = sublayers(layers, width, heads, dropout, causal=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes) for ``images`` (B, in_channels, image_size, image_size)."""
        stream = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.sublayers(self.dropout(stream))).mean(1))
