"""Random step functions in segments against the loop."""

import warnings

import pytest
import torch
from random_steps import RandomStep
from scan_tasks import loop
from torch.utils._pytree import tree_leaves

import gradfree


def gradients(program, run):
    """Return the outputs, the gradients, and whether there is a loss."""
    outputs = [t for t in tree_leaves(program.run(run)) if t is not None]
    final = program.parts + 1 if program.form != "tensor" and program.counts else program.parts
    final = 1 if program.form == "tensor" else final
    chosen = {"outputs": outputs[final:], "final": outputs[:final]}.get(program.losses, outputs)
    if program.losses == "one step":
        chosen = [t[t.shape[0] // 2] if t.dim() else t for t in outputs]
    live = [t for t in chosen if t.requires_grad]
    loss = sum((t.sin() * (1 + n)).sum() for n, t in enumerate(live))
    grads = torch.autograd.grad(loss, program.trained, allow_unused=True) if live else []
    return [t.detach().double() for t in outputs], [t.requires_grad for t in outputs], grads


def check(seed):
    """Compare a program with the loop; return whether it was cut in both passes."""
    expected, needed, expected_grads = gradients(RandomStep(seed), loop)
    program = RandomStep(seed)
    with warnings.catch_warnings(), gradfree.engine_figures() as figures:
        warnings.simplefilter("ignore")
        actual, now_needed, grads = gradients(program, program.cut)
    assert now_needed == needed, seed
    for now, own in zip(actual, expected, strict=True):
        assert (now - own).abs().max() <= 1e-10 * max(own.abs().max(), 1e-3), seed
    for grad, own in zip(grads, expected_grads, strict=True):
        if grad is None or own is None:
            # Where the loop gives no gradient, zeros are right, too.
            assert all(g is None or not g.any() for g in (grad, own)), seed
        else:
            assert (grad - own).abs().max() <= 1e-10 * max(own.abs().max(), 1e-3), seed
    return any(of["sequential"] == 0 for of in figures.values())


def test_random_steps_equal_the_loop():
    assert sum(map(check, range(60))) > 30


@pytest.mark.slow
def test_many_random_steps_equal_the_loop(request):
    count = request.config.getoption("--programs")
    cut = sum(map(check, range(1000, 1000 + count)))
    print(f"{cut} of {count} random steps ran in segments")
