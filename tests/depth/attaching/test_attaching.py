"""What a model may do around and inside its chains: the gradients are those of plain autograd."""

import copy

import pytest
import torch
from exact_engines import assert_exact
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree.testing.cases.models import (
    Model,
    NormAndDropout,
    Plain,
    assert_equal_gradients,
    gradients,
    plain_model,
)


def test_dropout_uses_the_masks_of_the_forward_pass_in_every_pull(engine):
    model, x = Model([NormAndDropout() for _ in range(4)]), torch.randn(8, 6)
    assert_exact(engine, model, lambda: model(x))


def test_batchnorm_statistics_are_updated_once(engine):
    model, x = Model([NormAndDropout() for _ in range(4)]), torch.randn(8, 6)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    gradients(model, lambda: model(x))
    with engine.attach(other):
        torch.manual_seed(1)
        gradients(other, lambda: other(x))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name)), name
    assert other.blocks[0].norm.num_batches_tracked == 1


def test_inputs_that_are_the_same_for_every_block(engine):
    model, x = plain_model(), torch.randn(4, 6)
    mask = torch.randn(6) > 0
    assert_exact(engine, model, lambda: model(x, mask, identity=False))


def test_the_initial_state_may_also_be_an_input_of_every_block(engine):
    model, x = plain_model(), torch.randn(4, 6)

    def run():
        h = h0 = model.stem(x)
        for block in model.blocks:
            h = block(h, h0)
        return h + h0

    assert_exact(engine, model, run)


def test_options_that_are_no_tensors_and_a_block_that_returns_its_input(engine):
    model, x = plain_model(), torch.randn(4, 6)

    def run():
        h = model.stem(x)
        for i, block in enumerate(model.blocks):
            h = block(h, identity=i == 2)
        return h

    assert_exact(engine, model, run)


def test_blocks_may_be_skipped(engine):
    model, x = plain_model(), torch.randn(4, 6)

    def run():
        h = model.stem(x)
        for i in (0, 1, 3):
            h = model.blocks[i](h)
        return h

    assert_exact(engine, model, run)


def test_a_block_that_ignores_or_detaches_its_input_cuts_the_chain_as_in_autograd(engine):
    class Detached(Plain):
        def forward(self, x):
            return super().forward(x.detach())

    model, x = Model([Plain(), Plain(), Detached(), Plain()]), torch.randn(4, 6)
    assert gradients(model, lambda: model(x))["blocks.1.linear.weight"] is None
    assert_exact(engine, model, lambda: model(x), ["blocks"])
    assert_exact(engine, model, lambda: model(x, taps=(0, 1, 2, 3)), ["blocks"])


def test_states_used_elsewhere_are_direct_cotangents(engine):
    """An auxiliary loss in the middle, a state handed to the caller, and a state used several times."""
    model, x = plain_model(), torch.randn(4, 6)

    def run():
        states = model.states(x)
        return states[1].exp().mean() + (states[2] * states[4]).sum() + states[2].pow(3).sum() * states[0].sum()

    assert_exact(engine, model, run)


def test_the_users_forward_hooks_tap_the_models_own_states(engine):
    """Registered before or after attaching, on outputs or inputs, or changing these: gradients are exact."""
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


def test_several_forward_passes_before_one_backward(engine):
    model, x, y = plain_model(), torch.randn(4, 6), torch.randn(3, 6)
    assert_exact(engine, model, lambda: torch.cat([model(x), model(y)]).exp())


def test_passes_that_run_in_lockstep(engine):
    model, x, y = plain_model(), torch.randn(4, 6), torch.randn(4, 6)

    def run():
        a, b = model.stem(x), model.stem(y)
        for block in model.blocks:
            a, b = block(a), block(b)
        return a * b

    assert_exact(engine, model, run)


def test_two_losses_of_one_pass_need_retain_graph_as_ever(engine):
    model, x = plain_model(), torch.randn(4, 6)

    def backward_twice(retain):
        model.zero_grad()
        states = model.states(x)
        states[1].pow(2).sum().backward(retain_graph=retain)
        states[4].pow(2).sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = backward_twice(True)
    with engine.attach(model):
        assert_equal_gradients(backward_twice(True), expected)
        with pytest.raises(RuntimeError, match="second time"):
            backward_twice(False)


def test_a_backward_pass_knows_nothing_of_another_ones_cotangents(engine):
    """A pass that asks for gradients of the head alone collects nothing that a later pass would find."""
    model, x = plain_model(), torch.randn(4, 6)
    expected = gradients(model, lambda: model.states(x)[2])
    with engine.attach(model):
        states = model.states(x)
        with pytest.raises(gradfree.ChainError, match="for the gradient of a state"):
            torch.autograd.grad(states[4].sum(), states[1], retain_graph=True)
        model.zero_grad()
        states[2].pow(2).sum().backward()
    assert_equal_gradients({n: p.grad for n, p in model.named_parameters()}, expected)


class FromBytes(Plain):
    def forward(self, x):
        return super().forward(x.double() / 255)


@pytest.mark.parametrize(
    ("first", "dtype"), [(lambda: nn.Embedding(2, 6), torch.long), (FromBytes, torch.uint8), (FromBytes, torch.bool)]
)
def test_a_chain_may_begin_with_whole_numbers(engine, first, dtype):
    """Tokens and bytes need no gradient, but the blocks that they enter do."""
    model = nn.Sequential(nn.Sequential(first(), Plain(), Plain()), nn.Linear(6, 1))
    x = torch.randint(2, (4, 6)).to(dtype)
    assert_exact(engine, model, lambda: model(x), ["0"])
    assert all(p.grad.abs().max() > 0 for p in model[0][1].parameters())


def test_checkpointing_inside_a_block(engine):
    class Checkpointed(Plain):
        def forward(self, x):
            return x + checkpoint(lambda h: torch.tanh(self.linear(h)), x, use_reentrant=False)

    model, x = Model([Checkpointed() for _ in range(3)]), torch.randn(4, 6)
    assert_exact(engine, model, lambda: model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(engine, dtype):
    """The gradients of an autocast pass agree with autograd's own to the precision of the low dtype."""
    model, x = plain_model().float(), torch.randn(16, 6, dtype=torch.float32)

    def run():
        with torch.autocast("cpu", dtype):
            return model(x).float()

    expected = gradients(model, run)
    with engine.attach(model):
        actual = gradients(model, run)
    assert {g.dtype for g in actual.values() if g is not None} == {torch.float32}
    assert_equal_gradients(actual, expected, tolerance=0.02)
