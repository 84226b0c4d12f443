"""Step functions drawn at random: trees, closures, masks, integers, arithmetic in place, frozen and unused weights."""

import random

import torch
import torch.nn.functional as F
from torch import nn

import gradfree

B, H, I = 2, 4, 3  # noqa: E741


class RandomStep:
    """A step function with its parameters and inputs, the same for the same seed.

    Args:
        seed: of everything that is drawn.
    """

    def __init__(self, seed):
        self.seed, draw = seed, random.Random(seed)
        torch.manual_seed(seed)
        self.length = draw.choice([1, 2, 5, 13, 24, 37, 48])
        self.segments = draw.choice([2, 3, 5, 8])
        self.burn = draw.choice([0, 1, 4, 9, 20])
        self.dim, self.reverse = draw.choice([0, 0, 0, 1]), draw.random() < 0.25
        self.parts = draw.choice([1, 1, 2, 3])
        self.counts = draw.random() < 0.15
        self.integers = draw.random() < 0.3
        self.form = draw.choice(["tensor", "tuple", "dict"])
        self.outputs = draw.choice(["state", "tree", "none", "integers", "outside"])
        self.losses = draw.choice(["all", "outputs", "final", "one step"])
        self.operations = [draw.choice(OPERATIONS) for _ in range(draw.randint(1, 4))]
        self.weights = [nn.Parameter(torch.randn(H, H) / 4) for _ in range(4)]
        self.read = nn.Linear(I, H)
        self.table = nn.Embedding(7, I)
        self.cell = draw.choice([nn.GRUCell, nn.RNNCell])(I, H)
        for weight in draw.sample(self.weights, draw.choice([0, 0, 1, 2])):
            weight.requires_grad_(False)
        shape = (B, self.length) if self.dim else (self.length, B)
        self.x = torch.randn(*shape, I, requires_grad=draw.random() < 0.7)
        self.ids = torch.randint(0, 7, shape)
        self.start = [torch.randn(B, H, requires_grad=draw.random() < 0.5) for _ in range(self.parts)]
        self.source = torch.randn(B, H, requires_grad=True)

    @property
    def trained(self):
        """All tensors whose gradients are compared."""
        modules = (self.read, self.table, self.cell)
        leaves = [*self.weights, *(p for m in modules for p in m.parameters()), self.x, *self.start, self.source]
        return [leaf for leaf in leaves if leaf.requires_grad]

    def run(self, scan):
        """Return the final carry and the outputs, by ``scan`` or a loop with its arguments."""
        context = (self.source @ self.weights[3]).sin()
        operations = [operation(self, context) for operation in self.operations]

        def step(carry, x):
            states = list(carry["s"] if self.form == "dict" else carry if self.form == "tuple" else [carry])
            count = states.pop() if self.counts and self.form != "tensor" else None
            given = (x["x"], x["ids"]) if self.integers else (x, None)
            fed = given[0] + self.table(given[1]) if self.integers else given[0]
            h = states[0]
            for operation in operations:
                h = operation(h, fed)
            states = [0.4 * s + 0.3 * h for s in states[:-1]] + [0.5 * states[-1] + 0.4 * torch.tanh(h)]
            y = self._outputs(states, h, x, context)
            if count is not None:
                states.append(count + 1)
            after = {"s": states, "n": None} if self.form == "dict" else tuple(states)
            return (after[0] if self.form == "tensor" else after), y

        states = list(self.start[:1] if self.form == "tensor" else self.start)
        if self.counts and self.form != "tensor":
            states.append(torch.zeros((), dtype=torch.long))
        init = {"s": states, "n": None} if self.form == "dict" else tuple(states)
        init = init[0] if self.form == "tensor" else init
        xs = {"x": self.x, "ids": self.ids} if self.integers else self.x
        return scan(step, init, xs, dim=self.dim, reverse=self.reverse)

    def _outputs(self, states, h, x, context):
        if self.outputs == "none":
            return None
        if self.outputs == "tree":
            return {"a": states[0], "b": (h.sum(-1), None, states[-1].detach())}
        if self.outputs == "integers":
            return h, (h > 0).sum(-1)
        return (h, context) if self.outputs == "outside" else states[-1]

    def cut(self, *arguments, **options):
        """Run ``gradfree.scan`` in this program's number of segments, to the last digit."""
        engine = gradfree.create_engine(
            "shooting", segments=self.segments, burn=self.burn, max_sweeps=self.segments, tolerance=1e-14
        )
        return gradfree.scan(*arguments, engine=engine, **options)


def _linear(p, context):
    return lambda h, x: torch.tanh(h @ p.weights[0] + p.read(x))


def _cell(p, context):
    return lambda h, x: p.cell(x, h)


def _gate(p, context):
    return lambda h, x: torch.lerp(h, p.read(x).tanh(), torch.sigmoid(h @ p.weights[1]))


def _where(p, context):
    return lambda h, x: torch.where(h > 0.1, 0.5 * h, h.sin() + p.read(x))


def _in_place(p, context):
    def run(h, x):
        new = p.read(x) + h
        new.mul_(0.5).add_(h @ p.weights[2])
        new[:, 1:] += 0.1
        return new.tanh_()

    return run


def _outside(p, context):
    return lambda h, x: h * 0.5 + context * torch.sigmoid(p.read(x))


def _same_weight(p, context):
    return lambda h, x: torch.tanh(h @ p.weights[3] + 0.2 * context)


def _mix(p, context):
    return lambda h, x: h - 0.3 * h.mean(0, keepdim=True) + p.read(x)


def _norm(p, context):
    return lambda h, x: F.layer_norm(h + p.read(x), (H,))


def _attend(p, context):
    def run(h, x):
        weights = torch.softmax(h @ context.transpose(0, 1), -1)
        return h * 0.4 + weights @ context

    return run


def _sort(p, context):
    return lambda h, x: h.sort(-1).values * 0.5 + p.read(x)


def _cumulate(p, context):
    return lambda h, x: h.cumsum(-1).tanh() * x[:, :1]


def _pick(p, context):
    return lambda h, x: h.gather(-1, x.argmax(-1, keepdim=True)).expand_as(h) * 0.5 + h * 0.2


def _einsum(p, context):
    return lambda h, x: torch.einsum("bi,ij->bj", h, p.weights[1]).tanh()


def _clone_from(p, context):
    def run(h, x):
        new = torch.zeros_like(h)
        new[:, :2] = h[:, 2:]
        new[:, 2:] = p.read(x)[:, :2]
        return new

    return run


OPERATIONS = [
    _linear,
    _cell,
    _gate,
    _where,
    _in_place,
    _outside,
    _same_weight,
    _mix,
    _norm,
    _attend,
    _sort,
    _cumulate,
    _pick,
    _einsum,
    _clone_from,
]
