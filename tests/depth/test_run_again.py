"""Blocks in batches are run again in the backward pass: as they ran in the forward pass, or that is refused."""

from contextlib import nullcontext

import pytest
from test_batched_surprises import BATCHED, CONTAINERS, Net, X, engine, warm
from torch.func import functional_call

from gradfree.errors import ChainError
from gradfree.testing.cases.models import Plain, assert_equal_gradients, gradients

CHANGES = {"h += 1": lambda h: h.add_(1), "h *= 2": lambda h: h.mul_(2), "h[0] = 0": lambda h: h[0].zero_()}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", BATCHED)
def test_the_output_of_the_chain_may_be_changed_in_place(name, container, change):
    """A batch computes outputs again, and needs none; what has been changed it does not hold to the pass."""
    model = Net(container=container)

    def run():
        h = model(X)
        change(h)
        return h

    expected = gradients(model, run)
    with engine(name).attach(model, ["blocks"], batched=True):
        for _ in range(3):
            assert_equal_gradients(gradients(model, run), expected)


@pytest.mark.parametrize("container", CONTAINERS)
def test_all_other_outputs_are_held_to_the_pass_where_the_last_is_changed(container):
    factor = [1.0]

    class Scaled(Plain):
        def forward(self, x):
            return super().forward(x) * factor[0]

    model = Net(Scaled, container)
    with engine("fixed_point").attach(model, ["blocks"], batched=True):
        warm(model)
        h = model(X)
        h += 1
        factor[0] = 2.0
        with pytest.raises(ChainError, match="gave other outputs in the forward pass"):
            h.sum().backward()


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("which", ["one block", "all blocks", "the model"])
def test_weights_that_are_computed_may_come_once_it_is_settled_what_is_batched(which, exactly):
    """By functional_call, as weight noise and hypernetworks do: what is run again must run with them."""
    model = Net()

    def scaled(module, x):
        return functional_call(module, {name: 1.5 * p for name, p in module.named_parameters()}, (x,))

    def run():
        if which == "the model":
            return scaled(model, X)
        h = model.stem(X)
        for i, block in enumerate(model.blocks):
            h = scaled(block, h) if which == "all blocks" or i == 3 else block(h)
        return h

    expected = gradients(model, run)
    with engine("highway_bp").attach(model, ["blocks"], batched=True) as handle:
        warm(model)
        with handle.exactly() if exactly else nullcontext():
            assert_equal_gradients(gradients(model, run), expected)


def test_blocks_that_are_run_again_one_by_one_are_held_to_the_pass_too():
    model = Net()
    with engine("highway_bp").attach(model, ["blocks"], batched=True) as handle:
        warm(model)
        loss = model(X).sum()
        weight = model.blocks[2].linear.weight
        weight.data = 2 * weight.data
        with handle.exactly(), pytest.raises(ChainError, match=r"blocks\.2 gave other outputs in the forward pass"):
            loss.backward()
