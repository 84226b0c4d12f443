"""LeNet-5, the convolutional network that rules of learning are usually compared on."""

from __future__ import annotations

from torch import Tensor, nn


class LeNet(nn.Module):
    """LeNet-5 with ReLUs and max pools: two convolutions, and layers of 120, 84 and ``num_classes``.

    LeCun et al. 1998, "Gradient-based learning applied to document recognition". All layers are in one
    ``nn.Sequential``, so that engines for blocks and those that take layers apart find the same chain.

    Args:
        in_channels: of the images.
        num_classes: of the logits.
        image_size: height and width of the images, 16 at least.

    Raises:
        ValueError: smaller images.
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10, image_size: int = 28):
        super().__init__()
        if image_size < 16:
            raise ValueError(f"image_size must be at least 16, not {image_size}: two 5×5 windows and pools go on it.")
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
