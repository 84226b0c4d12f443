"""``engine="newton"`` on narrow carries against the loop: states and gradients of random steps, fallbacks, memory."""

import warnings

import pytest
import torch
from narrow_steps import NarrowStep
from oracles import off_by
from scan_tasks import loop
from torch import nn
from torch.utils._pytree import tree_leaves

import gradfree
from gradfree import CellLayer

ENGINE = gradfree.create_engine("newton", max_sweeps=30)


def by_newton(*arguments, **options):
    return gradfree.scan(*arguments, engine=ENGINE, **options)


def gradients(program, scan):
    """Return the outputs, whether they need a gradient, and all gradients."""
    outputs = [t for t in tree_leaves(program.run(scan)) if t is not None]
    final = 1 + (program.form in ("parts", "dict"))
    chosen = outputs[:final] if program.losses == "final" else outputs
    if program.losses == "one step":
        chosen = [t[len(t) // 2] if t.dim() and len(t) else t for t in outputs]
    live = [t.abs() if t.is_complex() else t for t in chosen if t.requires_grad]
    # Scaled: the sine of a large number has no digits.
    live = [t / (1 + t.detach().abs().max()) for t in live if t.numel()]
    loss = sum((t.sin() * (1 + n)).sum() for n, t in enumerate(live))
    grads = torch.autograd.grad(loss, program.trained, allow_unused=True) if live else []
    return [t.detach() for t in outputs], [t.requires_grad for t in outputs], grads


def check(seed, within):
    """Compare a program with the loop; return whether all steps ran at once in both passes."""
    expected, needed, expected_grads = gradients(NarrowStep(seed), loop)
    with warnings.catch_warnings(), gradfree.engine_figures() as figures:
        warnings.simplefilter("ignore")
        actual, now_needed, grads = gradients(NarrowStep(seed), by_newton)
    assert now_needed == needed, seed
    for now, own in zip((*actual, *grads), (*expected, *expected_grads), strict=True):
        if now is None or own is None:
            # Where the loop gives no gradient, zeros are right, too.
            assert all(g is None or not g.any() for g in (now, own)), seed
        elif own.numel():
            assert (now - own).abs().max() <= within * max(own.abs().max(), 1e-3), seed
    return all(of["sequential"] == 0 and of["forward sequential"] == 0 for of in figures.values()) and bool(figures)


def test_random_narrow_steps_equal_the_loop():
    assert sum(check(seed, 1e-10) for seed in range(40)) > 25


@pytest.mark.slow
def test_many_random_narrow_steps_equal_the_loop(request):
    count = request.config.getoption("--programs")
    at_once = sum(check(seed, 1e-9) for seed in range(1000, 1000 + count))
    print(f"{at_once} of {count} random narrow steps ran at once")
