"""Steps of all kinds, run by ``gradfree.scan`` and by a loop."""

import random
import warnings

import torch
from oracles import off_by
from step_kinds import KINDS, B, I
from torch.utils._pytree import tree_leaves, tree_map

import gradfree


def loop(step, carry, xs, dim=0, reverse=False):
    """The plain loop, step by step."""
    xs = tree_map(lambda x: None if x is None else x.movedim(dim, 0), xs)
    length = next(len(x) for x in tree_leaves(xs) if x is not None)
    ys = []
    for t in reversed(range(length)) if reverse else range(length):
        carry, y = step(carry, tree_map(lambda x: None if x is None else x[t], xs))  # noqa: B023
        ys.append(y)
    ys = ys[::-1] if reverse else ys

    def stack(*of_steps):
        if of_steps[0] is None:
            return None
        stacked = torch.stack(of_steps)
        return stacked.movedim(0, dim) if dim < stacked.dim() else stacked

    return carry, tree_map(stack, *ys)


class CutTask:
    """A kind of step with its inputs; runs it in seven segments, or in a loop."""

    def __init__(self, kind, length):
        self.kind, self.length = kind, length
        self.was_cut, self.messages = False, []

    def make(self):
        torch.manual_seed(0)
        random.seed(0)
        self.x = torch.randn(self.length, B, I, requires_grad=True)
        self.params, self.step, self.init, self.xs = KINDS[self.kind][0](self)

    def gradients(self, run):
        self.make()
        carry, ys = run(self.step, self.init, self.xs)
        outputs = [t for t in tree_leaves((carry, ys)) if t is not None]
        real = [t.abs() if t.is_complex() else t for t in outputs]
        loss = sum((t.to(torch.float64).sin() * (1 + n)).sum() for n, t in enumerate(real))
        live = [p for p in (*self.params, self.x) if p.requires_grad]
        grads = torch.autograd.grad(loss, live, allow_unused=True)
        return [t.detach() for t in real], grads

    def cut(self, step, init, xs, **options):
        engine = gradfree.create_engine("shooting", segments=7, burn=6, max_sweeps=6, tolerance=1e-14)
        return gradfree.scan(step, init, xs, **{"engine": engine, **options})


class CompiledTask(CutTask):
    """A kind of step, compiled in seven segments or, with ``engine="backprop"``, in the plain loop."""

    def __init__(self, kind, engine=None):
        super().__init__(kind, 56)
        self.options = {"compile": True} if engine is None else {"compile": True, "engine": engine}

    def cut(self, step, init, xs):
        return super().cut(step, init, xs, **self.options)


def compare(task):
    """Return the largest difference between the loop and the segments."""
    expected, expected_grads = task.gradients(loop)
    with warnings.catch_warnings(record=True) as caught, gradfree.engine_figures() as figures:
        warnings.simplefilter("always")
        actual, grads = task.gradients(task.cut)
    task.messages = [str(w.message) for w in caught]
    task.was_cut = any(of["sequential"] == 0 for of in figures.values())
    assert [g is None for g in grads] == [g is None for g in expected_grads]
    assert [a.dtype for a in actual] == [e.dtype for e in expected]
    pairs = [(a, e) for a, e in zip((*actual, *grads), (*expected, *expected_grads), strict=True) if e is not None]
    wide = [(a.to(torch.float64), e.to(torch.float64)) for a, e in pairs]
    return off_by(*zip(*wide, strict=True))


class Calls:
    """Counts calls, out of sight of what a step may not change."""

    __slots__ = ("count",)


def counted(step):
    """Return ``step`` with a counter of its calls."""
    calls = Calls()
    calls.count = 0

    def run(s, x):
        calls.count += 1
        return step(s, x)

    return run, calls
