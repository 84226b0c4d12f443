"""What a model may do around and inside its chains: the gradients are those of plain autograd."""

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
