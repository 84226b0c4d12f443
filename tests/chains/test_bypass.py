"""A model that bypasses the engine's hooks gets autograd's gradients and a warning."""

import re
import warnings

import pytest
import torch

import gradfree
from gradfree.fidelity import loss_fidelity
from gradfree.testing.cases.models import Model, Plain

PAST = "the engine on 'blocks' has never run for "
ALL = re.escape(PAST + "5 of its 5 blocks (blocks.0, ...), but their parameters have gradients from autograd")


def batch():
    return torch.randn(4, 6, generator=torch.Generator(torch.get_default_device()).manual_seed(0))


class Past(Model):
    """Calls the forward of the blocks' class from ``start`` on, which bypasses the engine."""

    start = 0

    def states(self, x):
        """Return h_1 to h_L."""
        h, states = self.stem(x), []
        for i, block in enumerate(self.blocks):
            h = block(h) if i < self.start else type(block).forward(block, h)
            states.append(h)
        return states


def past(start=0):
    model = Past([Plain() for _ in range(5)])
    model.start = start
    return model


def loss_fn(out, target):
    return (out - target).pow(2).sum()


def step(model, optimizer):
    optimizer.zero_grad()
    model(batch()).pow(2).sum().backward()
    optimizer.step()


def wrapped(model):
    return gradfree.EngineOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model, "highway_bp")


def test_gradient_fidelity_raises_for_an_engine_that_never_runs():
    """Its cosine would be 1.0 at k = 0: autograd's gradients, compared with themselves."""
    with pytest.raises(gradfree.ChainError, match=ALL):
        gradfree.gradient_fidelity(
            gradfree.create_engine("highway_bp", iterations=0), past(), loss_fn, (batch(), batch()[:, 0])
        )


def test_a_partly_bypassed_chain_gives_a_warning():
    """Not an error: the gradients are exact, and a penalty on weights would look the same."""
    message = re.escape(PAST + "2 of its 5 blocks (blocks.3, ...)")
    with pytest.warns(UserWarning, match=message):
        gradfree.gradient_fidelity(gradfree.create_engine("highway_bp"), past(3), loss_fn, (batch(), batch()[:, 0]))
    model = past(3)
    optimizer = wrapped(model)
    with pytest.warns(UserWarning, match=message):
        step(model, optimizer)


def test_an_optimizer_step_warns_once():
    model = past()
    optimizer = wrapped(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(model, optimizer)
        optimizer.detach()
    assert [bool(re.match(ALL, str(warning.message))) for warning in caught] == [True]


class SideBySide(Model):
    """Blocks that run on the same input."""

    def states(self, x):
        h = self.stem(x)
        return [sum(block(h) for block in self.blocks)]


def test_blocks_that_are_separate_chains_give_a_warning():
    model = SideBySide([Plain() for _ in range(3)])
    optimizer = wrapped(model)
    with pytest.warns(UserWarning, match=r"has no effect: each block is a separate chain, .* computed by the model"):
        step(model, optimizer)


def stale(model, optimizer):
    """Gradients that exist before the engine is attached."""
    optimizer.detach()
    model(batch()).sum().backward()
    wrapped(model).step()
    optimizer.zero_grad(set_to_none=False)


def skipped(model, optimizer):
    """LayerDrop: a block that did not run has no gradient."""
    h = model.stem(batch())
    for block in (model.blocks[0], model.blocks[2]):
        h = block(h)
    h.sum().backward()
    optimizer.step()


def dropped_in_turn(model, optimizer):
    """LayerDrop: at some time each block is the first."""
    for first in range(5):
        h = model.stem(batch())
        for block in model.blocks[first:]:
            h = block(h)
        h.sum().backward()
        optimizer.step()


def both(model, optimizer):
    """A pass inside ``handle.exactly()`` counts as solved by the engine."""
    loss = model(batch()).sum()
    loss_fidelity(loss, model, optimizer.handle)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("run", [step, stale, skipped, dropped_in_turn, both])
def test_supported_uses_give_no_warning(run):
    model = Model([Plain() for _ in range(5)])
    optimizer = wrapped(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, optimizer)
        optimizer.detach()


class Masked(Plain):
    """Takes a constant before its state."""

    def forward(self, mask, x):
        return super().forward(mask * x)


class Pair(Plain):
    def forward(self, both):
        return both[1], super().forward(both[0])


class Others(Model):
    def __init__(self, kind):
        super().__init__([kind() for _ in range(4)])

    def states(self, x):
        h, mask = self.stem(x), torch.ones(6)
        if isinstance(self.blocks[0], Masked):
            return [h := block(mask, h) for block in self.blocks]
        both = h, h
        return [(both := block(both))[1] for block in self.blocks]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Masked, "no effect.*first argument needs no gradient, and another one does; if that is the state, name it"),
        (Pair, "has never run for .*Of 'blocks.*': its first argument is no tensor; name the argument that"),
    ],
)
def test_a_state_that_is_not_the_first_argument_is_the_reason(kind, why):
    model = Others(kind)
    with gradfree.create_engine("fixed_point", iterations=0).attach(model) as handle:
        model(batch()).sum().backward()
        with pytest.warns(UserWarning, match=why):
            handle.watch()
