"""The models of drawn programs: a pass of each returns the loss and keeps the states."""

from __future__ import annotations

from typing import Any

import torch
from drawn_programs import Drawn, Layers, Stack
from random_networks import SAMPLES, WIDTH, RandomNetwork
from torch import Tensor, nn


class Passes(RandomNetwork):
    """A network of ``random_networks`` that keeps its states."""

    @property
    def trained_blocks(self) -> list[nn.Module]:
        """Return the blocks."""
        return self.every_block()

    @property
    def weight(self) -> Tensor:
        """Return a weight of the first block."""
        return self.blocks[0].inner.weight

    def between(self, name, h):
        """Keep the state."""
        self.states.append(h)
        return super().between(name, h)

    def inputs(self, step):
        """Return a batch."""
        return torch.randn(SAMPLES, WIDTH)

    def run(self, x):
        """Return the loss."""
        self.states: list[Tensor] = []
        return self(x)


class Scaled(nn.Module):
    """A block with a parameter and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x):
        return x + torch.sin(x * self.gain + self.offset)


class Residual(nn.Module):
    """x + g(x), or with a norm or a gate around."""

    def __init__(self, branch, norm=None, gate=None):
        super().__init__()
        self.branch, self.norm, self.gate = branch, norm, gate

    def forward(self, x):
        g = self.branch(x)
        if self.gate is not None:
            t = torch.sigmoid(self.gate(x))
            return t * g + (1 - t) * x
        return x + g if self.norm is None else self.norm(x + g)


class Attention(nn.Module):
    """x + attention(LN(x)), each sample a sequence of two."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(2), nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x):
        h = self.norm(x.view(len(x), 2, 2))
        return x + self.attention(h, h, h, need_weights=False)[0].reshape(x.shape)


def block(kind: str, bias: bool = True) -> nn.Module:
    """Return a block of that kind for states of ``WIDTH``."""

    def linear():
        return nn.Linear(WIDTH, WIDTH, bias=bias)

    return {
        "linear": lambda: Residual(nn.Sequential(linear(), nn.Tanh())),
        "pre-norm": lambda: Residual(nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.GELU(), linear())),
        "post-norm": lambda: Residual(nn.Sequential(linear(), nn.SiLU()), norm=nn.LayerNorm(WIDTH)),
        "convolution": lambda: Residual(
            nn.Sequential(
                nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv1d(2, 1, 1)
            ).append(nn.Flatten())
        ),
        "batch norm": lambda: Residual(nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Tanh())),
        "dropout": lambda: Residual(nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.4))),
        "relu in place": lambda: Residual(nn.Sequential(linear(), nn.ReLU(inplace=True), linear())),
        "attention": Attention,
        "gated": lambda: Residual(nn.Sequential(linear(), nn.Tanh()), gate=linear()),
        "two layers": lambda: nn.Sequential(linear(), nn.Tanh()),
        "plain layer": linear,
        "scaled": Scaled,
    }[kind]()


class Stacked(nn.Module):
    """A stack as described."""

    def __init__(self, described: Stack):
        super().__init__()
        torch.manual_seed(described.seed)
        self.described = described
        self.stem = nn.Linear(WIDTH, WIDTH) if described.stem else nn.Identity()
        made = [block(described.kind) for _ in range(described.length)]
        for one in made[: described.frozen_first]:
            one.requires_grad_(False)
        self.change(made)
        container = described.container
        if container == "nested":
            half = len(made) // 2
            self.blocks: Any = nn.Sequential(nn.Sequential(*made[:half]), nn.Sequential(*made[half:]))
        elif container == "inside":
            self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*made), nn.Linear(WIDTH, WIDTH))
        else:
            self.blocks = nn.ModuleList(made) if container == "loop" else nn.Sequential(*made)
        self.head = nn.Linear(WIDTH, 2)
        self.train(described.training)
        if described.changed == "another mode":
            made[0].train(not described.training)

    @property
    def chains(self):
        """The paths of the chains."""
        return ["blocks.1"] if self.described.container == "inside" else ["blocks"]

    @property
    def trained_blocks(self):
        """Return the blocks."""
        return list(self.blocks)

    @property
    def weight(self):
        """Return a weight of the first block."""
        return next(self.blocks.parameters())

    def change(self, made):
        """Change the second block."""
        second, changed, kind = made[1], self.described.changed, self.described.kind
        if changed == "frozen":
            second.requires_grad_(False)
        elif changed == "half frozen":
            next(second.parameters()).requires_grad_(False)
        elif changed == "another epsilon":
            for module in second.modules():
                if isinstance(module, nn.LayerNorm | nn.BatchNorm1d):
                    module.eps = 0.1
        elif changed == "a hook":
            second.register_forward_hook(lambda module, given, out: out * 0.9)
        elif changed == "a hook inside":
            list(second.modules())[-1].register_forward_hook(lambda module, given, out: out * 0.9)
        elif changed == "shared":
            made[-1] = made[0]
        elif changed == "a weight shared":
            name = next(name for name, _ in made[0].named_parameters())
            path, _, name = name.rpartition(".")
            setattr(made[-1].get_submodule(path), name, getattr(made[0].get_submodule(path), name))
        elif changed == "another class":
            made[1] = block("gated")
        elif changed == "no bias":
            made[1] = block(kind, bias=False)

    def inputs(self, step):
        """Return a batch; the second has another size."""
        return torch.randn(SAMPLES + step % 2, WIDTH)

    def run(self, x):
        """Return the loss."""
        torch.manual_seed(self.described.seed)
        self.states: list[Tensor] = []
        h = self.stem(x)
        if self.described.container.startswith("loop") or self.described.taps:
            for one in self.blocks:
                h = one(h)
                self.states.append(h)
        else:
            h = self.blocks(h)
            self.states.append(h)
        loss = self.head(h).pow(2).sum()
        return loss + sum(torch.sin(s).sum() for s in self.states) if self.described.taps else loss

    def watched(self):
        """Return nothing."""
        return []


class Layered(nn.Module):
    """Layers as described."""

    def __init__(self, described: Layers):
        super().__init__()
        torch.manual_seed(described.seed)
        self.described = described
        layers: list[nn.Module] = []
        if described.convolution:
            layers += [nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, described.widths[0])]
        for before, after in zip(described.widths, described.widths[1:], strict=False):
            layers += [nn.Linear(before, after)]
            if described.norm:
                layers.append(nn.LayerNorm(after))
            layers.append(getattr(nn, described.activation)())
        self.layers = nn.Sequential(*layers, nn.Linear(described.widths[-1], 3))

    @property
    def chains(self):
        """Left to be found."""
        return None

    @property
    def trained_blocks(self):
        """Return the layers."""
        return list(self.layers)

    @property
    def weight(self):
        """Return a weight of the first layer."""
        return self.layers[0].weight

    def inputs(self, step):
        """Return a batch."""
        shape = (2, 3, 3) if self.described.convolution else self.described.widths[:1]
        return torch.randn(SAMPLES, *shape)

    def run(self, x):
        """Return the loss."""
        torch.manual_seed(self.described.seed)
        h, self.states = x, []
        for layer in self.layers:
            h = layer(h)
            self.states.append(h)
        loss = h.pow(2).sum()
        return loss + self.states[1].sin().sum() if self.described.tap else loss

    def watched(self):
        """Return nothing."""
        return []


def network(drawn: Drawn) -> Any:
    """Return the model of a program."""
    kind = {Stack: Stacked, Layers: Layered}.get(type(drawn.model), Passes)
    return kind(drawn.model)
