"""What a model may do around and inside its chains, and hooks on parameters: gradients are those of autograd."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree.testing.cases.models import (
    LayeredModel,
    Model,
    NormAndDropout,
    Plain,
    assert_equal_gradients,
    gradients,
    plain_model,
)

EXACT = {
    "backprop": gradfree.create_engine("backprop", plain=False),
    "highway_bp": gradfree.create_engine("highway_bp", iterations=9),
    "fixed_point": gradfree.create_engine("fixed_point", iterations=9),
}


@pytest.fixture(params=EXACT)
def engine(request):
    """An engine that is exact on chains of up to 10 links."""
    return EXACT[request.param]


def assert_exact(engine, model, run, chains=None):
    """Assert that the engine's gradients of ``run`` equal autograd's."""
    expected = gradients(model, run)
    with engine.attach(model, chains):
        assert_equal_gradients(gradients(model, run), expected)


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


def test_hooks_on_parameters_run_once_where_there_is_a_gradient(engine):
    """A skipped block's parameters have hooks that cannot take ``None``; the hooks do not change."""
    model, x = plain_model(), torch.randn(4, 6)
    skipped, tied = model.blocks[4].linear.weight, model.blocks[3].linear.bias
    hooks = [p.register_hook(lambda grad: 3 * grad.clamp(-0.1, 0.1)) for p in model.parameters()]
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


def test_a_backward_pass_that_raises_leaves_no_hook_that_runs_without_a_gradient(engine):
    model, x, calls = plain_model(), torch.randn(4, 6), []
    skipped = model.blocks[4].linear.weight
    skipped.grad = torch.zeros_like(skipped)
    skipped.register_post_accumulate_grad_hook(calls.append)

    def run():
        h = model.stem(x)
        for block in model.blocks[:3]:
            h = block(h)
        return h.sum()

    def fail(grad):
        raise ValueError("a bad batch")

    with engine.attach(model):
        hook = model.stem.weight.register_hook(fail)  # After the chain.
        with pytest.raises(ValueError, match="a bad batch"):
            run().backward()
        hook.remove()
        for _ in range(2):
            skipped.grad.zero_()
            run().backward()
    assert not calls


@pytest.mark.parametrize("make", [Model, lambda blocks: LayeredModel(*blocks)], ids=["ModuleList", "Sequential"])
def test_hooks_after_gradients_run_once_for_each_gradient(engine, make):
    """Not for one of an earlier pass: the gates are used in the first pass only."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.gate, self.uses_gate = nn.Linear(6, 6), nn.Linear(6, 6), True

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            return x + (y * self.gate(x).sigmoid() if self.uses_gate else y)

    def halve(p):
        p.grad.mul_(0.5)

    model, x, found = make([Gated() for _ in range(3)]), torch.randn(4, 6), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    for each in (None, engine):
        handle = each.attach(model) if each else None
        model.zero_grad()
        for uses_gate in (True, False):
            for block in model.blocks:
                block.uses_gate = uses_gate
            model(x).square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
        if handle:
            handle.detach()
    assert_equal_gradients(*found[::-1])


def test_reading_the_residual_path_recomputes_no_checkpointed_block():
    """Each block runs forward, in the iteration, and for its parameters; the mask is not on the path of x."""
    model, calls = nn.ModuleList(NormAndDropout() for _ in range(5)), []
    for n, block in enumerate(model):
        block.linear.register_forward_pre_hook(lambda *_, n=n: calls.append(n))
    with gradfree.create_engine("highway_bp", iterations=1).attach(model, [""]):
        h = torch.randn(4, 6, requires_grad=True)
        for block in model:
            h = checkpoint(block, h, use_reentrant=False)
        h.sum().backward()
    assert [calls.count(n) for n in range(5)] == [2, *[3] * 4]
