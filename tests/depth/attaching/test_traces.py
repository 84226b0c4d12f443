"""Passes and attachments leave nothing behind: no memory, no hooks, no broken state."""

import copy
import gc
import weakref

import pytest
import torch

import gradfree
from gradfree.depth.depth_pass import DepthPass
from gradfree.testing.cases.models import Model, Plain, PostLN, assert_equal_gradients, gradients, plain_model

HIGHWAY = gradfree.create_engine("highway_bp", iterations=9)


@pytest.mark.parametrize("backward", [True, False])
def test_a_pass_is_freed_with_its_last_tensor(backward, monkeypatch):
    """No reference cycle through autograd's C++ nodes, which Python's garbage collector could not see."""
    seen = []
    create = DepthPass.__init__

    def remember(self, *args):
        create(self, *args)
        seen.append(weakref.ref(self))

    monkeypatch.setattr(DepthPass, "__init__", remember)
    model, x = plain_model(), torch.randn(4, 6)
    with HIGHWAY.attach(model):
        model(x).sum().backward()  # The first pass loads parts of torch, which leave cycles.
    seen.clear()
    gc.collect()
    gc.disable()
    try:
        with HIGHWAY.attach(model):
            out = model(x).sum()
            assert seen[0]() is not None
            if backward:
                out.backward()
            del out
            assert seen[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("backward", [True, False])
def test_a_model_that_stores_a_state_is_freed(backward):
    """A block runs ``self.last = h``: autograd's nodes must lead to no module, or Python could not free the model."""
    model, x = plain_model(), torch.randn(4, 6)
    with HIGHWAY.attach(model):
        for _ in range(2):
            states = model.states(x)
            if backward:
                states[-1].sum().backward()
        model.last = states[-1]
        if backward:  # A pass that may still have a backward pass keeps its blocks.
            model.blocks[-1].last = states[-1]
    modules = [weakref.ref(module) for module in ([*model.modules()] if backward else [model])]
    del model, states
    gc.collect()
    assert not any(module() for module in modules)


def test_a_step_leaves_no_tensor_to_the_garbage_collector():
    """On a GPU such tensors would hold memory until Python's garbage collector runs."""
    model, x = Model([PostLN(6) for _ in range(4)]), torch.randn(4, 6)
    with HIGHWAY.attach(model):
        model(x).sum().backward()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            model(x).sum().backward()
            gc.collect()
            assert not [thing for thing in gc.garbage if isinstance(thing, torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()


def test_a_pass_recorded_before_detach_keeps_the_engine():
    model, x = plain_model(), torch.randn(4, 6)
    with gradfree.create_engine("truncated", window=1).attach(model):
        expected = gradients(model, lambda: model(x))
        model.zero_grad()
        loss = model(x).pow(2).sum()
    loss.backward()
    assert_equal_gradients({n: p.grad for n, p in model.named_parameters()}, expected)


def test_an_exception_in_a_block_leaves_the_next_pass_whole():
    class Fragile(Plain):
        fail = False

        def forward(self, x):
            if self.fail:
                raise ArithmeticError("on purpose")
            return super().forward(x)

    model, x = Model([Fragile() for _ in range(3)]), torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with HIGHWAY.attach(model):
        model.blocks[1].fail = True
        with pytest.raises(ArithmeticError):
            model(x)
        model.blocks[1].fail = False
        copy.deepcopy(model)
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)
