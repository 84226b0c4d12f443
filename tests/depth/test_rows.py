"""A row of blocks in an nn.Sequential, all batched, runs in one go: the same as block by block, hooks or no hooks."""

import copy
import pickle
from functools import partial

import pytest
import torch
from pairwise import pairwise
from torch import nn

import gradfree
from gradfree.depth import batching
from gradfree.depth.recorder import BlockRecorder
from gradfree.errors import ChainError
from gradfree.testing.cases.models import Plain, assert_equal_gradients, gradients

L = 6
ENGINES = {
    "highway_bp": {"iterations": L},
    "fixed_point": {"iterations": L},
    "truncated": {"window": L},
    "segments": {"iterations": 1, "segments": 2},
}


class Net(nn.Module):
    def __init__(self, blocks, stem=True):
        super().__init__()
        self.stem = nn.Linear(6, 6) if stem else nn.Identity()
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


class Wide(Plain):
    """Other shapes than Plain has."""

    def __init__(self):
        super().__init__()
        self.back = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.back(torch.tanh(self.linear(x)))


def tied():
    blocks = [Plain() for _ in range(L)]
    blocks[1].linear.weight = blocks[4].linear.weight
    return blocks


def frozen():
    blocks = [Plain() for _ in range(L)]
    for block in blocks:
        block.linear.bias.requires_grad_(False)
    return blocks


BLOCKS = {"alike": lambda: [Plain() for _ in range(L)], "tied": tied, "frozen": frozen}


def attach(model, name="highway_bp", batched=True):
    options = ENGINES[name]
    engine = gradfree.create_engine("highway_bp" if name == "segments" else name, **options)
    return engine.attach(model, ["blocks"], batched=batched)


@pytest.fixture
def entered(monkeypatch):
    """The blocks that the hooks have seen since the list was cleared."""
    seen, enter = [], BlockRecorder.enter

    def noted(self, block, args, kwargs):
        seen.append(self.path)
        return enter(self, block, args, kwargs)

    monkeypatch.setattr(BlockRecorder, "enter", noted)
    return seen


@pairwise(name=ENGINES, kind=BLOCKS, stem=[True, False], passes=[1, 2])
def test_exact_and_bitwise_without_a_hook_run_from_the_second_pass_on(name, kind, stem, passes, entered):
    model, xs = Net(BLOCKS[kind](), stem), [torch.randn(4, 6, dtype=torch.float64) for _ in range(passes)]

    def loss():
        return sum(model(x).square().sum() for x in xs)

    outs, expected = [model(x) for x in xs], gradients(model, loss)
    with attach(model, name):
        first = gradients(model, loss)
        entered.clear()
        second = gradients(model, loss)
        assert all(torch.equal(model(x), out) for x, out in zip(xs, outs, strict=True))
        assert not entered
    assert_equal_gradients(second, expected)
    # The shares of what is tied are added in another order.
    assert kind == "tied" or all(torch.equal(first[n], second[n]) for n in first if first[n] is not None)


def test_several_passes_accumulate_before_and_behind_retained_graphs():
    model, x = Net(BLOCKS["alike"]()), torch.randn(4, 6, dtype=torch.float64)
    (3 * model(x).sum()).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    with attach(model):
        for _ in range(3):
            model.zero_grad()
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            model(x).sum().backward()
            assert_equal_gradients({n: p.grad for n, p in model.named_parameters()}, expected)
            with pytest.raises(RuntimeError, match="a second time"):
                loss.backward()


def test_a_hook_of_the_users_runs_from_the_next_pass_on(entered):
    model, x = Net(BLOCKS["alike"]()), torch.randn(4, 6, dtype=torch.float64)
    seen, expected = [], gradients(model, lambda: model(x))
    with attach(model):
        for _ in range(2):
            gradients(model, lambda: model(x))
        entered.clear()
        tap = model.blocks[2].register_forward_hook(lambda block, args, out: seen.append(out))
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)
        assert len(seen) == 1
        assert entered
        tap.remove()
        entered.clear()
        gradients(model, lambda: model(x))
        assert not entered
        everywhere = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))
        gradients(model, lambda: model(x))
        everywhere.remove()
    assert set(model.blocks) <= set(seen[1:])


def test_gradient_hooks_on_parameters_run_once_with_the_whole_gradient():
    model, x = Net(tied()), torch.randn(4, 6, dtype=torch.float64)
    expected, seen = gradients(model, lambda: model(x)), []
    weight = model.blocks[1].linear.weight
    weight.register_hook(seen.append)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with attach(model):
        for _ in range(2):
            seen.clear()
            gradients(model, lambda: model(x))
            assert [torch.allclose(g, expected["blocks.1.linear.weight"], 0, 1e-10) for g in seen] == [True, True]


def append(model):
    model.blocks.append(Plain().double())


def replace(model):
    model.blocks[2] = Plain().double()


def exchange(model):
    model.blocks[2].linear.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))


def freeze(model):
    model.blocks[2].requires_grad_(False)


def load(model):
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [append, replace, exchange, freeze, load])
def test_what_the_container_and_its_blocks_hold_may_change(change):
    torch.manual_seed(0)
    model, x = Net(BLOCKS["alike"]()), torch.randn(4, 6, dtype=torch.float64)
    with attach(model, batched="auto") as handle:
        for _ in range(2):
            gradients(model, lambda: model(x))
        change(model)
        for _ in range(3):
            actual = gradients(model, lambda: model(x))
            plain = Net([Plain() for _ in model.blocks])
            plain.load_state_dict(model.state_dict())
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p.requires_grad_(q.requires_grad)
            assert_equal_gradients(actual, gradients(plain, partial(plain, x)))
        with handle.exactly():
            assert_equal_gradients(gradients(model, lambda: model(x)), actual)


@pytest.mark.parametrize("between", [True, False])
def test_a_container_that_runs_twice_in_a_pass_is_exact(between):
    class Twice(Net):
        def forward(self, x):
            h = self.blocks(self.stem(x))
            return self.head(self.blocks(h.relu() if self.between else h))

    model, x = Twice(BLOCKS["alike"]()), torch.randn(4, 6, dtype=torch.float64)
    model.between = between
    expected = gradients(model, lambda: model(x))
    engine = gradfree.create_engine("highway_bp", iterations=2 * L)
    with engine.attach(model, ["blocks"], batched="auto"):
        for _ in range(3):
            assert_equal_gradients(gradients(model, lambda: model(x)), expected)


def test_no_graph_where_the_model_wants_none_and_no_trace_behind():
    model, x = Net(BLOCKS["alike"]()), torch.randn(4, 6, dtype=torch.float64)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with attach(model):
        expected = gradients(model, lambda: model(x))
        gradients(model, lambda: model(x))
        with torch.no_grad():
            assert not model(x).requires_grad
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for _ in range(2):
            assert_equal_gradients(gradients(copied, lambda: copied(x)), expected)
        assert {name: set(vars(module)) for name, module in pickled.named_modules()} == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("how", ["in place", "a pair"])
def test_a_block_that_does_something_else_than_before_is_refused(how):
    class Changing(Plain):
        now = False

        def forward(self, x):
            out = super().forward(x)
            if not Changing.now:
                return out
            return (out, out) if how == "a pair" else x.mul_(2)

    model, x = Net([Changing() for _ in range(L)]), torch.randn(4, 6, dtype=torch.float64)
    with attach(model):
        for _ in range(2):
            gradients(model, lambda: model(x))
        Changing.now = True
        with pytest.raises(ChainError, match=r"blocks\.0 changes its state in place, or returns more than its state"):
            model(x)
        assert torch.is_grad_enabled()


def test_a_group_that_is_cut_and_one_that_is_not_alone(monkeypatch):
    """Stacks of what several batches have a part of each."""
    monkeypatch.setattr(batching, "_BYTES", 1500)
    blocks = [Plain() if i % 3 else Wide() for i in range(9)]
    model, x = Net(blocks), torch.randn(4, 6, dtype=torch.float64)
    expected = gradients(model, lambda: model(x))
    for options in ({"iterations": 9}, {"iterations": 2, "segments": 3}):
        with gradfree.create_engine("highway_bp", **options).attach(model, ["blocks"], batched=True):
            for _ in range(3):
                assert_equal_gradients(gradients(model, lambda: model(x)), expected)


def test_hooks_on_parameters_without_a_gradient_are_not_called():
    """As in backpropagation, where nothing leads to them."""

    class Partly(Plain):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(3))

    model, x = Net([Partly() for _ in range(L)]), torch.randn(4, 6, dtype=torch.float64)
    expected = gradients(model, lambda: model(x))
    for block in model.blocks:
        block.unused.register_hook(lambda g: 2 * g)
    with attach(model, batched="auto"):
        for _ in range(3):
            assert_equal_gradients(gradients(model, lambda: model(x)), expected)


def test_replicas_are_refused():
    model = Net(BLOCKS["alike"]())
    with attach(model), pytest.raises(ChainError, match=r"replicas of nn\.DataParallel"):
        model.blocks._replicate_for_data_parallel()


def test_a_hook_that_a_block_puts_on_its_state_later_is_refused():
    """It would see nothing: the states inside of a row have no gradient of their own."""

    class Hooking(Plain):
        now = False

        def forward(self, x):
            if Hooking.now:
                x.register_hook(print)
            return super().forward(x)

    model, x = Net([Hooking() for _ in range(L)]), torch.randn(4, 6, dtype=torch.float64)
    with attach(model):
        for _ in range(2):
            gradients(model, lambda: model(x))
        Hooking.now = True
        with pytest.raises(ChainError, match=r"blocks\.1 puts a gradient hook, or"):
            model(x)


def test_the_gradient_of_the_input_keeps_no_others_memory():
    """A view of all links' would, and would be saved with it."""
    blocks, x = nn.Sequential(*(Plain() for _ in range(L))), torch.randn(4, 6, requires_grad=True)
    with gradfree.create_engine("highway_bp", iterations=1).attach(blocks, [""], batched=True):
        blocks(x).sum().backward()
    assert x.grad.untyped_storage().nbytes() == x.nbytes
