"""The models that random programs describe."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from oracles import Halving
from random_programs import Block, Program
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, SAMPLES = 4, 3


class Square(torch.autograd.Function):
    """A custom function that saves what it needs."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * 2 * x


class CustomView(torch.autograd.Function):
    """A custom function whose output shares memory with its input."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 0.5


class Named(NamedTuple):
    """The output of some blocks."""

    state: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Output:
    """The output of some blocks, with a first field that is not set."""

    loss: None
    state: torch.Tensor
    weights: torch.Tensor


@dataclass
class ModelOutput(OrderedDict):
    """Like Hugging Face's outputs: a dictionary of the fields that are set, which are attributes, too."""

    loss: Any = None
    state: Any = None
    weights: Any = None

    def __post_init__(self):
        self.update({name: value for name, value in vars(self).items() if value is not None})

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class RandomBlock(nn.Module):
    """A block as described by a ``Block``."""

    def __init__(self, described: Block, shared: torch.Tensor):
        super().__init__()
        self.described = described
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.outside = [shared] * 3
        if "normed weight" in described.operations:
            self.outer = nn.utils.parametrizations.weight_norm(self.outer)
        if described.frozen == "a layer":
            self.inner.requires_grad_(False)
        elif described.frozen == "all":
            self.requires_grad_(False)
        self.kept = None

    def operate(self, name, h, side):
        """Apply the operation ``name`` to ``h``."""
        inner = self.inner
        if name == "side":
            return h if side is None else h * torch.cos(side)
        if name == "chunk":
            p, q = h.chunk(2, -1)
            return torch.cat([p + torch.sin(q), q], -1)
        if name == "no_grad part":
            with torch.no_grad():
                scale = torch.sigmoid(h).mean()
            return h * scale
        if name in ("hooked", "hook"):
            h = h * 1.0 if name == "hooked" else h
            if h.requires_grad:
                h.register_hook(lambda g: g * 2)
            return h
        if name in ("checkpoint", "reentrant"):
            return checkpoint(lambda t: torch.tanh(inner(t)), h, use_reentrant=name == "reentrant")
        return {
            "tanh": torch.tanh,
            "linear": inner,
            "norm": self.norm,
            "relu": torch.relu,
            "relu_": lambda h: torch.relu_(h * 1.0),
            "square": lambda h: Square.apply(h * 0.5),
            "custom view": CustomView.apply,
            # In place, which is allowed only if nothing else reads that cotangent.
            "halving": lambda h: Halving.apply(h * 1.0) * 1.0,
            "reshape": lambda h: torch.sin(h.reshape(-1, WIDTH)).reshape(h.shape),
            "transpose": lambda h: (h.transpose(0, 1) * 0.9).transpose(0, 1),
            "float": lambda h: h.float().double(),
            "dropout": partial(nn.functional.dropout, p=0.3, training=self.training),
            "detached part": lambda h: h + h.detach() * 0.5,
            "cut": lambda h: inner(h.detach()),
            "add_": lambda h: (h * 1.0).add_(inner.bias),
            "outside": lambda h: h * self.outside[0],
            "input of the model": lambda h: h * torch.cos(self.outside[1]),
            "older state": lambda h: h * torch.cos(self.outside[2]),
            "normed weight": self.outer,
            "where": lambda h: torch.where(h > 0, h, 0.1 * h),
            "cumsum": lambda h: h.cumsum(0) * 0.3,
            "index": lambda h: h[..., [1, 0, 3, 2]],
            "unsqueezed": lambda h: torch.cos(h.unsqueeze(0)).squeeze(0),
            "saved constant": lambda h: h * torch.linspace(0.5, 1, WIDTH),
        }[name](h)

    def form(self, x, g):
        """Return the next state."""
        if self.described.form == "gate":
            t = torch.sigmoid(self.outer(x))
            return t * g + (1 - t) * x
        if self.described.form == "x += g":
            x += torch.sin(g.clone())
            return x
        return {
            "x + g": lambda: x + g,
            "g": lambda: torch.sin(g),
            "relu(x + g)": lambda: torch.relu(x + g),
            "norm(x + g)": lambda: self.norm(x + g),
            "0.5 x + g": lambda: 0.5 * x + g,
            "lerp": lambda: torch.lerp(x, g, 0.3),
            "x": lambda: x,
            "relu_(x)": lambda: torch.relu_(x) * 0.9 + self.inner.bias,
            "view of x": lambda: x.view(x.shape),
        }[self.described.form]()

    def forward(self, x, side=None):
        """Return the next state and the extra output."""
        g = x
        for name in self.described.operations:
            g = self.operate(name, g, side)
        h = self.form(x, g)
        if self.described.keeps != "nothing":
            self.kept = {"branch": torch.sin(g), "input": torch.sin(x), "state": h}[self.described.keeps]
        return {
            "state": lambda: h,
            "tuple": lambda: (h, g * 2),
            "list": lambda: [h, [torch.cos(g)], "no tensor"],
            "dictionary": lambda: {"h": h, "weights": torch.softmax(g, -1)},
            "dataclass": lambda: Output(None, h, torch.softmax(g, -1)),
            "named tuple": lambda: Named(h, torch.softmax(g, -1)),
            "model output": lambda: ModelOutput(None, h, torch.softmax(g, -1)),
            "twin": lambda: (h, h),
            "view": lambda: (h, h[:, :2]),
            "none": lambda: (h, None),
            "input": lambda: (h, x),
            "side": lambda: (h, side),
            "second": lambda: ("weights", h),
        }[self.described.returns]()


def parts(out):
    """Return the state and the extra tensors."""
    if isinstance(out, tuple) and isinstance(out[0], str):
        return out[1], []
    if isinstance(out, Output | Named):
        return out.state, [out.weights]
    if isinstance(out, ModelOutput):
        return out.state, [out["weights"]]
    if isinstance(out, dict):
        return out["h"], [out["weights"]]
    if isinstance(out, list):
        return out[0], out[1]
    if isinstance(out, tuple):
        return out[0], [t for t in out[1:] if t is not None]
    return out, []


class RandomNetwork(nn.Module):
    """A model as described by a ``Program``; its forward pass returns two terms of the loss."""

    def __init__(self, program: Program):
        super().__init__()
        torch.manual_seed(program.seed)
        self.program = program
        self.stem = nn.Linear(WIDTH, WIDTH) if program.stem == "a layer" else nn.Identity()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.memories = nn.Parameter(torch.randn(len(program.blocks), WIDTH))
        first, second = (
            [described[0]] * len(described) if program.alike and described else described
            for described in (program.blocks, program.more)
        )
        if program.whole:
            first = [replace(program.blocks[0], returns="state")] * len(program.blocks)
        self.blocks = nn.Sequential(*(RandomBlock(described, self.scale) for described in first))
        self.more = nn.ModuleList(RandomBlock(described, self.scale) for described in second)
        if program.tied:
            self.blocks[-1].inner.weight = self.blocks[0].inner.weight
        self.train(program.training)
        self.seen, self.tapped = [], []

    @property
    def chains(self):
        """The paths of the chains."""
        return ["blocks", "more"] if len(self.more) else ["blocks"]

    def every_block(self):
        """Return the blocks of both chains."""
        return [*self.blocks, *self.more]

    def forward(self, x):
        """Return the terms of the loss from the states inside the chain, and from the last one."""
        program = self.program
        torch.manual_seed(program.seed)
        h = x @ self.blocks[0].inner.weight if program.stem == "a block's weight" else self.stem(x)
        for block in self.every_block():
            block.kept = None
            if not program.whole:
                block.outside[1:] = x, h
        total = torch.sin(h).sum() if program.taps[-1] else torch.zeros(())
        sides = {
            "shared": torch.tanh(self.memories[0]),
            "of the first state": torch.tanh(h),
            "older state": torch.tanh(h),
            "returned by the first block": None,
        }
        if program.whole:
            h = self.blocks(h)
        order = range(len(self.blocks)) if program.order is None else [n % len(self.blocks) for n in program.order]
        calls = [*((n, self.blocks[n]) for n in order if not program.whole), *enumerate(self.more)]
        for step, (n, block) in enumerate(calls):
            # A reentrant checkpoint would run with the last one again, and so run itself without end.
            if program.around != "reentrant":
                block.outside[2] = sides["older state"]
            before = h
            h, rest = parts(self.call(block, h, self.side(sides, n, h)))
            sides["older state"] = before
            if step == 0 and rest and rest[0].shape == h.shape:
                sides["returned by the first block"] = rest[0]
            # Under Limits, as what blocks keep.
            if program.rest and (block.described.form != "x" or program.backward != "grad of states"):
                total = total + sum((t**2).mean() for t in rest)
            if program.taps[step]:
                total = total + torch.sin(h).sum()
                self.tapped.append(h)
            h, more = self.between(program.between[step], h)
            total = total + more
        h = self.finish(h)
        # Under Limits: torch.autograd.grad for states before a chain alone misses what its blocks keep.
        if program.kept and program.around == "nothing" and program.backward != "grad of states":
            total = total + sum(block.kept.mean() for block in self.every_block() if block.kept is not None)
        return total, torch.zeros(()) if program.loss == "no last state" else (h**2).sum()

    def call(self, block, h, side):
        """Call ``block``, in a checkpoint or not."""
        given = (h,) if side is None else (h, side)
        if self.program.keywords and self.program.around == "nothing":
            return block(**dict(zip(("x", "side"), given, strict=False)))
        if self.program.around == "nothing" or (
            self.program.around == "reentrant" and block.described.returns not in ("state", "tuple")
        ):
            return block(*given)
        return checkpoint(block, *given, use_reentrant=self.program.around == "reentrant")

    def side(self, sides, n, h):
        """Return the inputs of a block beside its state."""
        name = self.program.sides
        return {
            "none": lambda: None,
            "own": lambda: torch.cos(self.memories[n % len(self.memories)]),
            "state": lambda: h,
            "mixed": lambda: sides["shared"] if n % 2 else None,
            "shared, detached": lambda: sides["shared"].detach(),
        }.get(name, lambda: sides[name])()

    def between(self, name, h):
        """Return the input state of the next block, and a term of the loss."""
        nothing = torch.zeros(())
        if name in ("doubling hook", "hook", "retain_grad") and h.requires_grad:
            self.watch(name, h)
        if name == "late hook" and h.requires_grad:
            later = parts(self.call(self.blocks[0], h, None))[0]
            self.watch("hook", h)
            return later, nothing
        if name == "branch":
            return h, parts(self.blocks[0](h))[0].sum()
        if name == "change of a copy":
            return h, h.clone().mul_(2).mean()
        if name == "change in place":
            h += 0.1
            return h, nothing
        if name == "sum":
            return h, h.sum()
        if name == "another pass":
            other = self.stem(h * 0.5)
            for block in self.blocks:
                other = parts(self.call(block, other, None))[0]
            return h, other.sum()
        if name == "no_grad block":
            with torch.no_grad():
                scale = parts(self.blocks[0](h.clone()))[0].mean().cos()
            return h * scale, nothing
        return {
            "scale": lambda: h * 1.1,
            "view": lambda: h.view(h.shape),
            "noise": lambda: h + torch.randn(h.shape) * 0.01,
            "detach": lambda: h.detach(),
            "transpose twice": lambda: h.transpose(0, 1).transpose(0, 1),
            "single": lambda: h.float().double(),
            "chunk": lambda: torch.cat(h.chunk(2, -1), -1),
        }.get(name, lambda: h)(), nothing

    def watch(self, name, h):
        """Register a hook on the gradient of ``h``, or retain it; the hook may change the gradient."""
        if name == "retain_grad":
            h.retain_grad()
            self.seen.append(h)
        else:
            seen = []

            def look(g):
                seen.append(None if g is None else g.clone())
                return g * 2 if name == "doubling hook" and g is not None else None

            h.register_hook(look)
            self.seen.append(seen)

    def finish(self, h):
        """Return the last state as the loss uses it."""
        if self.program.end == "add_":
            h = h.clone() if h.is_leaf else h
            h += 0.3
        elif self.program.end == "relu_":
            h = torch.relu_(h * 1)
        elif self.program.end == "states change":
            with torch.no_grad():
                for state in self.tapped:
                    state.mul_(2)
        elif self.program.end == "hook" and h.requires_grad:
            self.watch("hook", h)
        return h

    def watched(self):
        """Return the gradients of the states that the model has observed so far."""
        return [g for seen in self.seen for g in (seen if isinstance(seen, list) else [seen.grad])]
