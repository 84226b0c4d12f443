"""What a model may do around and inside its chains, and hooks on parameters: gradients are those of autograd."""

import torch
from exact_engines import assert_exact
from torch import nn

from gradfree.testing.cases.models import (
    Plain,
    assert_equal_gradients,
    gradients,
    plain_model,
)


def test_forward_hooks_of_the_user_see_the_models_states(engine):
    """Registered before or after attaching, on outputs or inputs, also if they change these: gradients are exact."""
    model, x = plain_model(), torch.randn(4, 6)
    taps = []
    model.blocks[1].register_forward_hook(lambda module, args, out: taps.append(out))
    model.blocks[2].register_forward_pre_hook(lambda module, args: taps.append(args[0]))

    def run():
        taps.clear()
        return model(x) + sum(tap.pow(2).sum() for tap in taps)

    assert_exact(engine, model, run)
    with engine.attach(model):
        model.blocks[3].register_forward_hook(lambda module, args, out: taps.append(out))
        model.blocks[1].register_forward_pre_hook(lambda module, args: (2 * args[0],))
        actual = gradients(model, run)
    assert_equal_gradients(actual, gradients(model, run))


def test_a_chain_may_begin_with_tokens(engine):
    """They need no gradient, but the blocks that use them do."""
    model = nn.Sequential(nn.Sequential(nn.Embedding(2, 6), Plain(), Plain()), nn.Linear(6, 1))
    x = torch.randint(2, (4, 6))
    assert_exact(engine, model, lambda: model(x), ["0"])
    assert all(p.grad.abs().max() > 0 for p in model[0][1].parameters())


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
