"""A recurrent image classifier that reads one pixel at each step."""

from __future__ import annotations

from torch import Tensor, nn

from gradfree.models.recurrent import recurrent, remember


class PixelClassifier(nn.Module):
    """Reads an image pixel by pixel, in H·W steps, and classifies it from the last state.

    Linear stem, one recurrent layer, multilayer perceptron with one hidden layer: the pixel-level CIFAR-10 model of
    Highway-BP (arXiv 2501.17086, Tables 2 and 5).

    Args:
        in_channels: number of image channels.
        num_classes: number of classes.
        cell: "gru", "lstm", "rnn", "para_gru" or "para_lstm".
        width: width of stem, states and hidden layer.
        memory: number of steps that units initially remember (:func:`~gradfree.models.recurrent.remember`).
            ``None``: torch's initialisation.

    Raises:
        ValueError: unknown cell, or ``memory`` below 3 or for another cell than "gru" or "lstm".
    """

    def __init__(
        self, in_channels: int, num_classes: int, cell: str = "gru", width: int = 64, memory: int | None = None
    ):
        super().__init__()
        self.stem = nn.Linear(in_channels, width)
        self.rnn = recurrent(cell, width)
        if memory is not None:
            remember(self.rnn, memory)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes) for ``images`` (B, in_channels, H, W), read row by row from the left."""
        pixels = images.flatten(2).transpose(1, 2)
        outputs, _ = self.rnn(self.stem(pixels))
        return self.head(outputs[:, -1])
