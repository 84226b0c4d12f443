"""LeNet-5, a convolutional network on which learning rules are often compared."""

from __future__ import annotations

from torch import Tensor, nn


class LeNet(nn.Module):
    """LeNet-5 with ReLUs and max pools: two convolutions, and layers of 120, 84 and ``num_classes``.

    LeCun et al. 1998, "Gradient-based learning applied to document recognition". All layers are in one
    ``nn.Sequential``, so that engines for blocks and engines for single layers find the same chain.

    Args:
        in_channels: number of image channels.
        num_classes: number of classes.
        image_size: height and width of the images, at least 16.

    Raises:
        ValueError: smaller images.
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10, image_size: int = 28):
        super().__init__()
        if image_size < 16:
            raise ValueError(
                f"image_size must be at least 16, not {image_size}: two 5×5 convolutions and poolings need that."
            )
        side = ((image_size - 4) // 2 - 4) // 2
        self.layers = nn.Sequential(
            *(nn.Conv2d(in_channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(16 * side**2, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes) for ``images`` (B, in_channels, image_size, image_size)."""
        return self.layers(images)
