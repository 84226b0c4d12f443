"""Parameters that are tied, frozen, hooked or accumulated into get the gradients of plain autograd."""

import torch
from exact_engines import assert_exact

from gradfree.testing.cases.models import (
    Model,
    Plain,
    plain_model,
)


def test_a_frozen_prefix_is_not_walked(engine):
    """What needs no gradient in plain PyTorch needs none here: no graph, no iterations."""
    model, x = plain_model(), torch.randn(4, 6)
    for part in (model.stem, *model.blocks[:2]):
        part.requires_grad_(False)
    with engine.attach(model):
        assert [h.requires_grad for h in model.states(x)] == [False, False, True, True, True]


def test_a_block_may_return_a_parameter_itself(engine):
    class Constant(Plain):
        def forward(self, x):
            return self.linear.weight

    model, x = Model([Plain(), Constant(), Plain()]), torch.randn(6, 6)
    assert_exact(engine, model, lambda: model(x), ["blocks"])
    assert_exact(engine, model, lambda: model(x, taps=(0, 1, 2)), ["blocks"])


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
