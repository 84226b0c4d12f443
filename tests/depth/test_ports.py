"""Blocks whose state is not the first argument and the first output; ``programs`` has other arguments and outputs."""

import pytest
import torch
from torch import nn

import gradfree
from gradfree.testing.cases.models import Plain, assert_equal_gradients, gradients


class MaskFirst(Plain):
    """Takes the state as the second argument and returns it as the second output."""

    def forward(self, scale, x):
        return scale.sum(), super().forward(x, scale)


class Derived(MaskFirst):
    pass


class MaskFirstPort(gradfree.Port):
    state = "x"

    def split(self, out):
        return out[1], out[0]

    def join(self, state, rest):
        return rest, state


@pytest.mark.parametrize("keyword", [False, True])
def test_a_registered_port_finds_the_state(keyword, monkeypatch):
    blocks = nn.ModuleList([MaskFirst(), Derived(), MaskFirst(), Derived()])
    model, x = nn.ModuleList([nn.Linear(6, 6), blocks]), torch.randn(4, 6)
    monkeypatch.setattr("gradfree.depth.ports._ports", {nn.Module: gradfree.Port})

    def run():
        h, scale = model[0](x), 2 * model[0].bias
        for block in model[1]:
            _, h = block(scale, x=h) if keyword else block(scale, h)
        return h

    expected = gradients(model, run)
    for registered in (False, True):
        with gradfree.create_engine("highway_bp", iterations=4).attach(model, ["1"]) as handle:
            assert_equal_gradients(gradients(model, run), expected)
        # Gradients are exact without the port, too, but the blocks are not one chain.
        assert bool(handle.chains["1"].splits) is not registered
        gradfree.register_port(MaskFirst, MaskFirstPort)


class Reading(nn.Module):
    """Attends to keys and values, in a tuple or one by one."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)

    def forward(self, x, *memory):
        k, v = memory[0] if len(memory) == 1 else memory
        return x + (self.query(x) @ k.mT).softmax(-1) @ v


class Decoder(nn.Module):
    def __init__(self, in_tuple):
        super().__init__()
        self.memory, self.blocks = nn.Linear(4, 4), nn.ModuleList(Reading() for _ in range(3))
        self.in_tuple = in_tuple

    def forward(self, x, source, hook=None):
        k, v = (self.memory(source * sign) for sign in (1, -1))
        if hook is not None:
            k.register_hook(hook)
        for block in self.blocks:
            x = block(x, (k, v)) if self.in_tuple else block(x, k, v)
        return x


@pytest.mark.parametrize("in_tuple", [False, True])
@pytest.mark.parametrize("hook", [None, lambda g: g.clamp(-0.02, 0.02)])
@pytest.mark.parametrize("source_trains", [False, True])
def test_tensors_of_other_arguments_may_be_in_a_tuple(in_tuple, hook, source_trains):
    """They are arguments, and no tensors from outside: a hook sees the whole gradient, once."""
    model, x = Decoder(in_tuple), torch.randn(2, 3, 4)
    source = torch.randn(2, 5, 4, requires_grad=source_trains)
    leaves = [*model.parameters(), *[source] * source_trains]

    def found():
        return torch.autograd.grad(model(x, source, hook).square().sum(), leaves)

    expected = found()
    with gradfree.create_engine("highway_bp", iterations=3).attach(model):
        for g, e in zip(found(), expected, strict=True):
            torch.testing.assert_close(g, e)


class Collecting(nn.Module):
    """Takes a number and a list in a tuple, and appends to the list."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, extra):
        scale, seen = extra
        x = x + scale * torch.tanh(self.linear(x))
        seen.append(x.detach())
        return x


class Collector(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(Collecting() for _ in range(3))

    def forward(self, x):
        h = self.first(x)
        seen = [h]
        for block in self.blocks:
            h = block(h, (0.5, seen))
        return h + sum(seen)


def test_a_list_in_a_tuple_is_the_callers_own():
    """A block may append to it: a copy would lose that."""
    model, x = Collector(), torch.randn(2, 4)
    expected = gradients(model, lambda: model(x))
    with gradfree.create_engine("highway_bp", iterations=3).attach(model, ["blocks"]):
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)


class Hooking(Reading):
    """Puts a hook that clips on what it is given beside its state."""

    def forward(self, x, k, v):
        k.register_hook(lambda g: g.clamp(-0.02, 0.02))
        return super().forward(x, k, v)


def test_a_hook_of_a_block_on_another_argument_is_refused():
    """It would see the gradient of one block at a time."""
    model = Decoder(in_tuple=False)
    model.blocks[1] = Hooking()
    with (
        gradfree.create_engine("highway_bp", iterations=3).attach(model, ["blocks"]),
        pytest.raises(gradfree.ChainError, match="on one of its inputs, where it would see only a part"),
    ):
        model(torch.randn(2, 3, 4), torch.randn(2, 5, 4))


class Ignoring(Reading):
    def forward(self, x, k, v):
        return x + self.query(x) * v.mean()


def test_a_hook_on_an_argument_that_no_block_uses_is_not_called():
    model, x, source = Decoder(in_tuple=False), torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    model.blocks = nn.ModuleList(Ignoring() for _ in range(3))
    called = []

    def found():
        return gradients(model, lambda: model(x, source, called.append))

    expected = found()
    with gradfree.create_engine("highway_bp", iterations=3).attach(model, ["blocks"]):
        assert_equal_gradients(found(), expected)
    assert not called


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(4, 4) for _ in range(3))

    def forward(self, x):
        h = c = torch.zeros_like(x)
        for cell in self.cells:
            h, c = cell(x, (h, c))
        return h


@pytest.mark.filterwarnings("ignore")
def test_a_state_that_is_passed_on_in_a_tuple_is_exact():
    model, x = Cells(), torch.randn(2, 4)
    expected = gradients(model, lambda: model(x))
    with gradfree.create_engine("fixed_point", iterations=3).attach(model, ["cells"]):
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)
