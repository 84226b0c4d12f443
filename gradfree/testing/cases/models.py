"""Blocks and small models with one chain each, and the comparison of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gradfree.registry import create_model

Gradients = Mapping[str, Tensor | None]


class PostLN(nn.Module):
    """LN(x + g(x)), as in the first transformers and BERT."""

    def __init__(self, width: int, affine: bool = True):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=affine)
        if affine:
            nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state."""
        return self.norm(x + torch.tanh(self.linear(x)))


class Gated(nn.Module):
    """A highway layer: t⊙g(x) + (1-t)⊙x."""

    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state."""
        t = torch.sigmoid(self.gate(x))
        return t * torch.tanh(self.linear(x)) + (1 - t) * x


class NormAndDropout(nn.Module):
    """x + dropout(relu(norm(linear(x)))): the batch has statistics, the branch a mask."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state."""
        return x + self.dropout(torch.relu(self.norm(self.linear(x))))


class Plain(nn.Module):
    """x + g(x), the simplest residual block; an extra argument scales the branch."""

    def __init__(self, width: int = 6, bias: bool = True):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the next state."""
        branch = torch.tanh(self.linear(x))
        return x + (branch if scale is None else scale * branch)


def _block(model: str, path: str, **options: int) -> nn.Module:
    """Return the block at ``path`` of a new registered model, with its layers' own initial weights.

    The model's may be so small that next to nothing comes back through a branch.
    """
    block = create_model(model, **options).get_submodule(path)
    for layer in block.modules():
        getattr(layer, "reset_parameters", lambda: None)()
    return block


_GPT = partial(_block, "gpt", vocab_size=1, context=1, layers=1, width=6, heads=2)

BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (Plain, (4, 6)),
    "pre-activation ResNet": (partial(_block, "preact_resnet", "blocks.1", depth=8, width=3), (4, 3, 8, 8)),
    "post-activation ResNet": (partial(_block, "postact_resnet", "blocks.0", depth=8, width=3), (4, 3, 4, 4)),
    "pre-LN attention": (partial(_GPT, "sublayers.0"), (2, 5, 6)),
    "pre-LN MLP": (partial(_GPT, "sublayers.1"), (2, 5, 6)),
    "post-LN": (lambda: PostLN(6), (2, 5, 6)),
    "post-LN, no scale": (lambda: PostLN(6, affine=False), (2, 5, 6)),
    "highway layers": (lambda: Gated(6), (4, 6)),
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
        """Return the sum of the heads behind the states ``taps``, (N,)."""
        states = self.states(x, *args, **kwargs)
        return torch.stack([(states[i] * self.heads[i]).flatten(1).sum(1) for i in taps]).sum(0)


def plain_model(length: int = 5) -> Model:
    """Return a model of ``length`` simplest blocks."""
    return Model([Plain() for _ in range(length)])


class LayeredModel(nn.Module):
    """Stem, layers in an ``nn.Sequential``, and a head behind them."""

    def __init__(self, *layers: nn.Module, width: int = 6, outputs: int | None = None):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.Sequential(*layers)
        self.heads = nn.ParameterList([torch.randn(outputs or width)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the head behind the last layer, (N,)."""
        return (self.blocks(self.stem(x)) * self.heads[0]).flatten(1).sum(1)


def layered_model() -> LayeredModel:
    """Return a model of linear layers and activations."""
    return LayeredModel(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


class OwnCell(nn.Module):
    """A recurrent cell that torch does not have."""

    def __init__(self, width: int):
        super().__init__()
        self.hidden_size = width
        self.linear = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """Return the next state."""
        return 0.5 * state + torch.tanh(self.linear(torch.cat([x, state], 1)))


class RecurrentModel(nn.Module):
    """Stem, a recurrent layer with ``batch_first``, and a head behind its outputs and final states.

    Args:
        layer: as torch's; takes sequences of ``width``.
        outputs: units of its outputs.
        packed: whether it is given packed sequences of different lengths.
        width: of the input.
    """

    def __init__(self, layer: nn.Module, outputs: int = 4, packed: bool = False, width: int = 6):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.layer = layer
        self.packed = packed
        self.head = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return (N,) for ``x`` (N, T, width)."""
        # Two operations: torch compiles no graph of one.
        fed: Any = torch.tanh(self.stem(x))
        if self.packed:
            lengths = torch.tensor([max(1, x.shape[1] - n % 3) for n in range(len(x))], device="cpu")
            fed = pack_padded_sequence(fed, lengths, batch_first=True, enforce_sorted=False)
        out, finals = self.layer(fed)
        out = pad_packed_sequence(out, batch_first=True)[0] if self.packed else out
        of_states = [f.transpose(-2, 0).flatten(1).sum(1) for f in (finals if isinstance(finals, tuple) else (finals,))]
        return (self.head * out).flatten(1).sum(1) + torch.stack(of_states).sum(0)


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor | None]:
    """Return the gradients of the scalar or vector that ``run`` computes (squared and summed), by name."""
    model.zero_grad()
    run().pow(2).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal_gradients(actual: Gradients, expected: Gradients, tolerance: float = 1e-10) -> None:
    """Check that the same gradients are ``None``, and the others equal relative to the largest.

    Raises:
        AssertionError: they are not; the message names the parameter.
    """
    for name in actual.keys() ^ expected.keys():
        raise AssertionError(f"{name} is there only once")
    for name, g in actual.items():
        if (g is None) != (expected[name] is None):
            raise AssertionError(f"{name} {'lacks a' if g is None else 'has got a'} gradient")
    scale = max((g.abs().max() for g in expected.values() if g is not None), default=torch.zeros(()))
    for name, g in expected.items():
        other = actual[name]
        if g is not None and other is not None:
            error = (other - g).abs().max() / (scale if scale > 0 else 1.0)
            # Not the other way round: NaN is no number that compares.
            if not error <= tolerance:
                raise AssertionError(f"{name} is off by {error:.1e}, where {tolerance:.0e} is allowed")
