"""Parameters that are tied, frozen, hooked or accumulated into get the gradients of plain autograd."""

import torch
from exact_engines import assert_exact

from gradfree.testing.cases.models import (
    plain_model,
)


def test_hooks_on_parameters_run_once(engine):
    model, x = plain_model(), torch.randn(4, 6)
    model.blocks[2].linear.weight.register_hook(lambda grad: 3 * grad)
    calls = []
    model.blocks[1].linear.weight.register_post_accumulate_grad_hook(calls.append)
    assert_exact(engine, model, lambda: model(x))
    assert len(calls) == 2


def test_hooks_on_parameters_without_a_gradient_do_not_run(engine):
    """A skipped block's parameters are clipped by hooks that cannot take ``None``; the hooks do not change."""
    model, x = plain_model(), torch.randn(4, 6)
    skipped, tied = model.blocks[4].linear.weight, model.blocks[3].linear.bias
    hooks = [p.register_hook(lambda grad: grad.clamp(-0.1, 0.1)) for p in model.parameters()]
    before = dict(skipped._backward_hooks)

    def run():
        h = model.stem(x)
        for block in model.blocks[:3]:
            h = block(h)
        return h + tied  # After the chain, in another part of the loss.

    assert_exact(engine, model, run)
    assert skipped.grad is None
    assert tied.grad is not None
    assert dict(skipped._backward_hooks) == before
    for hook in hooks:
        hook.remove()
    assert not skipped._backward_hooks
