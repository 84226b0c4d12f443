"""Steps with narrow carries, drawn at random: filters, detectors, switches, products, rows that depend on others."""

import random

import torch
from torch import nn

B = 3


class NarrowStep:
    """A step function with its parameters and inputs, the same for the same seed.

    Args:
        seed: of everything that is drawn.
    """

    def __init__(self, seed):
        self.seed, draw = seed, random.Random(seed)
        torch.manual_seed(seed)
        self.length = draw.choice([2, 3, 17, 40, 90])
        self.width = draw.randint(1, 8)
        self.rows = draw.choice([(B,), (B,), (1,), ()])
        self.form = draw.choice(["one", "one", "parts", "dict", "complex"])
        self.decay = draw.choice([0.0, 0.5, 0.9, 0.99, 0.999])
        self.gain = draw.choice([0.02, 0.1, 0.4])
        self.rounds = [draw.choice(OPERATIONS) for _ in range(draw.randint(1, 3))]
        self.mixes = draw.random() < 0.1
        self.reverse = draw.random() < 0.2
        self.outputs = draw.choice(["state", "state", "tree", "none", "detached"])
        self.losses = draw.choice(["all", "final", "one step"])
        self.weights = [nn.Parameter(torch.randn(self.width, self.width) / self.width) for _ in range(2)]
        self.read, self.bias = nn.Parameter(torch.randn(self.width)), nn.Parameter(torch.randn(self.width))
        for p in draw.sample([*self.weights, self.bias], draw.choice([0, 0, 1])):
            p.requires_grad_(False)
        self.source = torch.randn(self.width, requires_grad=True)
        self.x = torch.randn(self.length, *self.rows, self.width, requires_grad=draw.random() < 0.5)
        self.start = torch.randn(*self.rows, self.width, requires_grad=draw.random() < 0.5)

    @property
    def trained(self):
        """All tensors whose gradients are compared."""
        leaves = (*self.weights, self.read, self.bias, self.source, self.x, self.start)
        return [leaf for leaf in leaves if leaf.requires_grad]

    def run(self, scan):
        """Return the final carry and the outputs, by ``scan`` or a loop with its arguments."""
        context = self.source.sin()

        def step(carry, x):
            s = self.joined(carry)
            h = s
            for operation in self.rounds:
                h = operation(self, h, x * self.read)
            s = self.decay * s + self.gain * h
            if self.mixes:
                s = s - 0.1 * s.mean(0, keepdim=True)
            if self.outputs == "tree":
                return self.parted(s), {"a": (h, None), "b": (s * context).sum(-1)}
            return self.parted(s), {"none": None, "detached": s.detach()}.get(self.outputs, s)

        # What one program has learnt must not reach the others.
        step.__code__ = step.__code__.replace(co_name=f"step_{self.seed}")
        return scan(step, self.parted(self.start), self.x, reverse=self.reverse)

    def parted(self, s):
        """Return a carry from one tensor."""
        if self.form == "one" or (self.form == "complex" and self.width % 2):
            return s
        if self.form == "complex":
            return torch.complex(*s.chunk(2, -1))
        parts = (s[..., 0], s[..., 1:])
        return {"a": parts[0], "b": parts[1], "none": None} if self.form == "dict" else parts

    def joined(self, carry):
        """Undo :meth:`parted`."""
        if isinstance(carry, torch.Tensor):
            return torch.cat([carry.real, carry.imag], -1) if carry.is_complex() else carry
        first, rest = (carry["a"], carry["b"]) if isinstance(carry, dict) else carry
        return torch.cat([first[..., None], rest], -1)


def _linear(p, h, x):
    return torch.tanh(h @ p.weights[0] + x)


def _detector(p, h, x):
    return torch.where(x > h, 0.7 * x + 0.3 * h, h) + p.bias


def _clamp(p, h, x):
    return (h + x).clamp(-1, 1)


def _product(p, h, x):
    return h * torch.sigmoid(h @ p.weights[1]) + x


def _own_units(p, h, x):
    return torch.sin(h) * p.bias + x


def _in_place(p, h, x):
    new = h + x
    new.mul_(0.5).add_(p.bias)
    return new


def _shift(p, h, x):
    return torch.roll(h, 1, -1) + x


def _norm(p, h, x):
    return (h + x) / (1 + h.square().sum(-1, keepdim=True)).sqrt()


def _relu(p, h, x):
    return torch.relu(h @ p.weights[1]) - x


def _outside(p, h, x):
    return h * 0.5 + p.source * x


OPERATIONS = [
    _linear,
    _detector,
    _clamp,
    _product,
    _own_units,
    _in_place,
    _shift,
    _norm,
    _relu,
    _outside,
]
