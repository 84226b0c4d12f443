"""Blocks, models and the oracle that the tests share: plain autograd in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradfree.models.gpt import AttentionSublayer, MLPSublayer
from gradfree.models.resnet import PostActBlock, PreActBlock


class PostLN(nn.Module):
    """LN(x + g(x)), as in the first transformers and BERT."""

    def __init__(self, width: int, affine: bool = True):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=affine)
        if affine:
            nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + torch.tanh(self.linear(x)))


class Gated(nn.Module):
    """A highway layer: t⊙g(x) + (1-t)⊙x."""

    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.sigmoid(self.gate(x))
        return t * torch.tanh(self.linear(x)) + (1 - t) * x


class Plain(nn.Module):
    """x + g(x), the simplest residual block; extra arguments scale and switch off the branch."""

    def __init__(self, width: int = 6, **kwargs: object):
        super().__init__()
        self.linear = nn.Linear(width, width, **kwargs)

    def forward(self, x: Tensor, scale: Tensor | None = None, *, identity: bool = False) -> Tensor:
        if identity:
            return x
        branch = torch.tanh(self.linear(x))
        return x + (branch if scale is None else scale * branch)


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (Plain, (4, 6)),
    "preact_resnet": (lambda: PreActBlock(3, 2), (4, 3, 8, 8)),
    "postact_resnet": (lambda: PostActBlock(3, 1), (4, 3, 4, 4)),
    "preln_attention": (lambda: AttentionSublayer(6, 2, 0.0), (2, 5, 6)),
    "preln_mlp": (lambda: MLPSublayer(6, 0.0), (2, 5, 6)),
    "postln": (lambda: PostLN(6), (2, 5, 6)),
    "postln_no_affine": (lambda: PostLN(6, affine=False), (2, 5, 6)),
    "gated": (lambda: Gated(6), (4, 6)),
}
"""Each kind of block with the shape of a state it takes."""


class Model(nn.Module):
    """Stem, blocks that the model iterates itself, and a head behind every block."""

    def __init__(self, blocks: list[nn.Module], width: int = 6):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(blocks)
        self.heads = nn.ParameterList([torch.randn(width) for _ in blocks])

    def states(self, x: Tensor, *args: object, **kwargs: object) -> list[Tensor]:
        """Return h_1 to h_L."""
        h, states = self.stem(x), []
        for block in self.blocks:
            h = block(h, *args, **kwargs)
            states.append(h)
        return states

    def forward(self, x: Tensor, *args: object, taps: tuple[int, ...] = (-1,), **kwargs: object) -> Tensor:
        """Return the sum of the heads behind the states ``taps``."""
        states = self.states(x, *args, **kwargs)
        return torch.stack([(states[i] * self.heads[i]).flatten(1).sum(1) for i in taps]).sum(0)


def plain_model(length: int = 5) -> Model:
    """Return a model of ``length`` simplest blocks."""
    return Model([Plain() for _ in range(length)])


class LayeredModel(nn.Module):
    """Stem, layers in an ``nn.Sequential``, and a head behind them."""

    def __init__(self, *layers: nn.Module, width: int = 6):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.Sequential(*layers)
        self.heads = nn.ParameterList([torch.randn(width)])

    def forward(self, x: Tensor, taps: tuple[int, ...] = (-1,)) -> Tensor:
        """Return the head behind the last layer, the only tap."""
        return (self.blocks(self.stem(x)) * self.heads[0]).flatten(1).sum(1)


def layered_model() -> LayeredModel:
    """Return a model of linear layers and activations."""
    return LayeredModel(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor | None]:
    """Return the gradients of the scalar or vector that ``run`` computes (squared and summed), by name."""
    model.zero_grad()
    run().pow(2).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal_gradients(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float = 1e-10
) -> None:
    """Assert that the same gradients are ``None``, and the others equal relative to the largest."""
    assert {n for n, g in actual.items() if g is None} == {n for n, g in expected.items() if g is None}
    scale = max(g.abs().max() for g in expected.values() if g is not None)
    for name, g in expected.items():
        if g is not None:
            error = (actual[name] - g).abs().max() / scale if scale > 0 else actual[name].abs().max()
            assert error <= tolerance, f"{name} is off by {error:.1e}"
