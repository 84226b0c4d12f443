"""Models of many kinds, small ones, on which advice is held against an exhaustive run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from gradfree import CellLayer, create_model
from gradfree.benchmarks.advice.job import Batch, Job

_FEATURES, _CLASSES = 16, 4
_BATCHES = 2


class Last(nn.Module):
    """A recurrent layer, and a linear one on its last output.

    Args:
        layer: batch first.
        outputs: of ``layer``.
    """

    def __init__(self, layer: nn.Module, outputs: int):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(outputs, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 4) for ``x``, (B, T, 16)."""
        logits: Tensor = self.head(self.layer(x)[0][:, -1])
        return logits


@dataclass(frozen=True)
class Known:
    """A model, and what a batch of its examples is.

    Attributes:
        build: returns the model.
        shape: of the inputs.
        tokens: of how many kinds inputs and targets are, which are one a step then; 0: numbers, and a class each.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return random inputs and targets."""
        if self.tokens:
            return torch.randint(self.tokens, self.shape), torch.randint(self.tokens, self.shape)
        return torch.randn(self.shape), torch.randint(_CLASSES, self.shape[:1])


def _recurrent(layer: Callable[..., nn.Module], units: int, batch: int, steps: int, **options: int) -> Known:
    def build() -> nn.Module:
        return Last(layer(_FEATURES, units, batch_first=True, **options), units * (1 + options.get("bidirectional", 0)))

    return Known(build, (batch, steps, _FEATURES))


def _cell_layer(features: int, units: int, batch_first: bool) -> nn.Module:
    return CellLayer(nn.GRUCell(features, units), batch_first=batch_first)


def _dense(depth: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def _of_ours(model: str, *shape: int, tokens: int = 0, **options: object) -> Known:
    return Known(partial(create_model, model, **options), shape, tokens)


KNOWN: Mapping[str, Known] = {
    "GRU, 1 sequence of 2,048": _recurrent(nn.GRU, 64, 1, 2048),
    "GRU, 32 of 64": _recurrent(nn.GRU, 64, 32, 64),
    "GRU of 2 layers, 8 of 128": _recurrent(nn.GRU, 64, 8, 128, num_layers=2),
    "GRU in both directions, 8 of 128": _recurrent(nn.GRU, 64, 8, 128, bidirectional=True),
    "LSTM, 1 sequence of 2,048": _recurrent(nn.LSTM, 128, 1, 2048),
    "LSTM, 32 of 64": _recurrent(nn.LSTM, 64, 32, 64),
    "RNN, 1 sequence of 2,048": _recurrent(nn.RNN, 64, 1, 2048),
    "cell in a loop, 8 of 64": _recurrent(_cell_layer, 32, 8, 64),
    "character GRU, 16 of 128": _of_ours("recurrent_lm", 16, 128, tokens=128, vocab_size=128, cell="gru", width=128),
    "GPT of 4 layers": _of_ours("gpt", 16, 48, tokens=127, vocab_size=127, context=48, layers=4, width=48, heads=4),
    "ResNet of 14 layers": _of_ours("preact_resnet", 16, 1, 8, 8, depth=14, in_channels=1, num_classes=_CLASSES),
    "residual MLP of 64 blocks": _of_ours(
        "residual_mlp", 32, _FEATURES, in_features=_FEATURES, num_classes=_CLASSES, depth=64, width=32
    ),
    "64 dense layers": Known(partial(_dense, 64, 16), (32, 16)),
    "orthogonal MLP of 20 layers": _of_ours(
        "orthogonal_mlp", 64, _FEATURES, in_features=_FEATURES, num_classes=_CLASSES, depth=20
    ),
}
"""By what they are for people."""


@dataclass(frozen=True)
class KnownJob(Job):
    """One of :data:`KNOWN`, by its name, on random examples."""

    def build(self) -> nn.Module:
        """Return a new model in training mode."""
        return KNOWN[self.model].build().to(self.device).train()

    def once(self) -> Iterator[Batch]:
        """Yield the batches."""
        for _ in range(_BATCHES):
            yield [x.to(self.device) for x in KNOWN[self.model].batch()]
