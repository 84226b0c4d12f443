"""Equal blocks in an nn.Sequential run as one autograd function: same gradients as block by block, or an error."""

import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from threading import Lock

import numpy
import pytest
import torch
from pairwise import pairwise
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree.errors import ChainError
from gradfree.rows.row import RowPlan
from gradfree.rows.settings import Settings
from gradfree.testing.cases.models import LayeredModel, Plain, PostLN, assert_equal_gradients, gradients
from gradfree.torchside.graph import walk

L = 6
ENGINES = {
    "highway_bp": {"iterations": L},
    "highway_bp, 2": {"iterations": 2, "gamma": 0.3},
    "fixed_point": {"iterations": L},
    "truncated, 2": {"window": 2},
    "dsf, 1": {"feedback": 0.7, "iterations": 1},
}


def net(make=Plain):
    return LayeredModel(*(make() for _ in range(L)))


def attach(model, name="fixed_point", batched=True, **options):
    engine = gradfree.create_engine(name.partition(",")[0], **(options or ENGINES[name]))
    return engine.attach(model, ["blocks"], batched=batched)


def is_row(out):
    """Return whether all blocks are one node of autograd's graph, so that ``out`` has few nodes."""
    return len(walk([out]).nodes) <= L + 2


KINDS = {
    "tied": lambda model: setattr(model.blocks[1].linear, "weight", model.blocks[4].linear.weight),
    "frozen": lambda model: [block.linear.bias.requires_grad_(False) for block in model.blocks],
    "unused": lambda model: [block.register_parameter("unused", nn.Parameter(torch.ones(3))) for block in model.blocks],
    "repeated": lambda model: setattr(model, "blocks", nn.Sequential(*[Plain()] * L)),
    "changed in place": lambda model: model.blocks.register_forward_hook(lambda module, args, out: out.add_(1).relu_()),
    "first": lambda model: setattr(model, "stem", nn.Identity()),
}


@pairwise(name=ENGINES, kind=KINDS, passes=[1, 2], batched=[True, "auto"])
def test_gradients_are_those_one_by_one_and_outputs_bitwise_equal(name, kind, passes, batched):
    model, xs = net(), [torch.randn(4, 6) for _ in range(passes)]
    KINDS[kind](model)

    def loss():
        return sum(model(x).square().sum() for x in xs)

    outs, exact = [model(x) for x in xs], gradients(model, loss)
    assert not is_row(outs[0])
    with attach(model, name, batched=False):
        expected = gradients(model, loss)
    with attach(model, name, batched) as handle:
        for _ in range(2):
            assert_equal_gradients(gradients(model, loss), expected)
        with handle.exactly():
            assert_equal_gradients(gradients(model, loss), exact)
        rows = [model(x) for x in xs]
    assert all(is_row(row) and torch.equal(row, out) for row, out in zip(rows, outs, strict=True))


def test_parameters_that_are_computed_from_others_lead_to_these():
    """First-order MAML: functional_call() with weights that are one step further."""
    model, x = net(), torch.randn(4, 6)

    def run():
        return torch.func.functional_call(model, {name: p - 0.1 * p.sin() for name, p in model.named_parameters()}, x)

    expected = gradients(model, run)
    with attach(model):
        assert_equal_gradients(gradients(model, run), expected)


def test_nan_reaches_the_gradients_of_a_row():
    model, x = net(), torch.randn(4, 6)
    with attach(model):
        model(x / 0).sum().backward()
    assert all(p.grad.isnan().any() for p in model.blocks.parameters())


def block(forward):
    """Return a class of blocks with this ``forward``."""
    return type(forward.__name__, (Plain,), {"forward": forward})


class Reversed(torch.autograd.Function):
    forward, backward = staticmethod(lambda ctx, x: 2 * x), staticmethod(lambda ctx, g: -g)


class Counting(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(x)


class CountingUnseen(Counting):
    def forward(self, x):
        self._buffers["count"].add_(1)
        return Plain.forward(self, x)


SCALE = torch.ones(())
BLOCKS = {
    "draws a new mask": lambda: nn.Sequential(Plain(), nn.Dropout(0.5)),
    "statistics of its batch": lambda: nn.Sequential(Plain(), nn.BatchNorm1d(6)),
    "in place": lambda: nn.Sequential(Plain(), nn.ReLU(inplace=True)),
    "works in place": block(lambda self, x: x + F.relu(self.linear(x), inplace=True)),
    "calls tanh_": block(lambda self, x: x + self.linear(x).tanh_()),
    "share a parameter": lambda: nn.Sequential(*[nn.Linear(6, 6)] * 2),
    "stores tensors": block(lambda self, x: vars(self).update(kept=x) or Plain.forward(self, x)),
    "calls register_hook": block(
        lambda self, x: x + (y := torch.tanh(self.linear(x)), y.requires_grad and y.register_hook(torch.neg))[0]
    ),
    "checkpoint": block(lambda self, x: checkpoint(super(type(self), self).forward, x, use_reentrant=False)),
    "counts from inside": Counting,
    "ask whether a tensor needs": block(
        lambda self, x: x + torch.tanh(self.linear(x) if self.linear.weight.requires_grad else x)
    ),
    "call select_scatter": block(
        lambda self, x: x + torch.select_scatter(y := torch.tanh(self.linear(x)), y[:, 0], 1, 2)
    ),
    "changes its buffers": CountingUnseen,
    "does not run in a batch": block(lambda self, x: self.linear.double() and Plain.forward(self, x)),
    "no parameter or buffer": lambda: (holder := Plain(), setattr(holder, "scale", SCALE))[0],
    "not known, a function": block(lambda self, x: x + Reversed.apply(torch.tanh(self.linear(x)))),
    "not known, an operation": block(lambda self, x: x + torch.erf(self.linear(x))),
    "known, normalised": lambda: PostLN(6),
    "known, layers": lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.0)),
    "not known, no trace": block(lambda self, x: x + torch.tanh(self.linear(x)) * float(sum(range(len(x))) / len(x))),
}


@pytest.mark.parametrize("why", BLOCKS)
def test_blocks_that_are_no_row_run_one_by_one_or_are_refused_with_batched_true(why):
    model, x = net(BLOCKS[why]), torch.randn(4, 6)
    if "known" not in why:
        with attach(model), pytest.raises(ChainError, match=rf"batched=True, but .*{why}"):
            model(x)
    torch.manual_seed(1)
    expected = gradients(model, lambda: model(x))
    with attach(model, batched="auto"):
        torch.manual_seed(1)
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)
        assert is_row(model(x)) == why.startswith("known")
        if why == "known, layers":
            model.blocks[-1][2].p = 0.5
            assert not is_row(model(x))


DRAWS = {"Python": random.random, "NumPy": numpy.random.random, "torch": lambda: torch.rand(()).item()}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_blocks_that_draw_random_numbers_run_one_by_one(draw):
    """As in stochastic depth; a row would draw again in the backward pass, or get the same numbers for all blocks."""
    model, x = net(block(lambda self, x: x if draw() < 0.0 else Plain.forward(self, x))), torch.randn(4, 6)
    found = []
    for batched in (False, "auto"):
        random.seed(0), numpy.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
        with attach(model, batched=batched):
            found.append((gradients(model, lambda: model(x)), draw()))
    (expected, next_expected), (own, next_own) = found
    assert_equal_gradients(own, expected)
    assert next_own == next_expected
    with attach(model), pytest.raises(ChainError, match=r"batched=True, but .*draw random numbers"):
        model(x)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)], ids=["convolution first", "norm first"])
def test_convolutions_in_channels_last_layout_run_one_by_one(order):
    """Torch crashes where the norm's input gets no gradient."""

    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            layers = nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.ReLU()
            self.layers = nn.Sequential(*[layers[n] for n in order])

        def forward(self, x):
            return x + self.layers(x)

    # Other devices may not know this layout.
    blocks = nn.Sequential(*(Convolved() for _ in range(L)))
    model = nn.Sequential(nn.Conv2d(3, 3, 1), blocks).to("cpu", memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 4, device="cpu")
    expected = gradients(model, lambda: model(x).sum())
    with gradfree.create_engine("fixed_point", iterations=L).attach(model):
        assert_equal_gradients(gradients(model, lambda: model(x).sum()), expected)


def test_residual_paths_that_are_not_the_same_number_in_every_pass_run_one_by_one():
    model, x = net(lambda: PostLN(6)), torch.randn(4, 6)
    with attach(model, "highway_bp, 2", batched=False):
        expected = gradients(model, lambda: model(x))
    with attach(model, "highway_bp, 2", batched="auto"):
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)


kept = []


def overwriting(self, x):
    with torch.no_grad():
        x += 1
    return Plain.forward(self, x)


@pytest.mark.parametrize(
    "forward", [lambda self, x: kept.append(x) or Plain.forward(self, x), lambda self, x: (x, x), overwriting]
)
def test_stored_tensors_pairs_and_overwritten_states_are_refused_with_batched_true(forward):
    with attach(model := net(block(forward))), pytest.raises(ChainError, match=r"batched=False|change the shape"):
        model(torch.randn(4, 6))


def test_batched_true_is_refused_where_no_row_is_possible():
    model = nn.Sequential(net().blocks, nn.ModuleList(net().blocks))
    for chain, engine, options in (
        ("1", "fixed_point", {}),
        ("0", "backprop", {"plain": False}),
        ("0", "highway_bp", {"segments": 2}),
    ):
        with pytest.raises(ChainError, match="batched=True"):
            gradfree.create_engine(engine, **options).attach(model, [chain], batched=True)


def anomalous(model, x):
    with torch.autograd.detect_anomaly():
        return model(x)


ONE_BY_ONE = {
    "a loop over them": lambda model, x: reduce(lambda h, block: block(h), model.blocks, model.stem(x)).sum(1),
    "autocast": lambda model, x: torch.autocast(x.device.type, torch.bfloat16)(model)(x),
    "a checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "anomaly detection": anomalous,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("why", ONE_BY_ONE)
def test_passes_that_run_one_by_one_are_refused_with_batched_true(why):
    model, x = net(), torch.randn(4, 6)
    with attach(model, batched=False):
        expected = gradients(model, lambda: ONE_BY_ONE[why](model, x))
    with attach(model, batched="auto"):
        assert_equal_gradients(gradients(model, lambda: ONE_BY_ONE[why](model, x)), expected)
    with attach(model), pytest.raises(ChainError, match=r"batched=True, but the blocks from blocks\.0 on are run one"):
        ONE_BY_ONE[why](model, x)
    with attach(model):
        gradients(model, lambda: model(x))


def test_a_block_that_stores_the_output_of_all_is_freed():
    row = net().blocks
    with gradfree.create_engine("fixed_point").attach(row, [""], batched=True):
        row[1].kept = 2 * row(torch.randn(4, 6))
        row[1].kept.sum().backward()
    storing = weakref.ref(row[1])
    del row
    gc.collect()
    assert storing() is None


REFUSED = {
    "create_graph": lambda model, x, loss: torch.autograd.grad(loss.sum(), model.stem.weight, create_graph=True),
    "many": lambda model, x, loss: torch.autograd.grad(loss, model.stem.weight, torch.eye(4), is_grads_batched=True),
    "in place": lambda model, x, loss: (model.blocks.load_state_dict(model.blocks.state_dict()), loss.sum().backward()),
    "batched=False": lambda model, x, loss: (model.seen.append(0), loss.sum().backward()),
    "transform": lambda model, x, loss: torch.func.grad(lambda x: model(x).sum())(x),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_pass_leaves_the_next_pass_exact(why):
    seen = []
    model, x = net(block(lambda self, x: x + torch.tanh(self.linear(x)) / (1 + len(seen)))), torch.randn(4, 6)
    model.seen = seen
    with attach(model):
        with pytest.raises(ChainError, match=why):
            REFUSED[why](model, x, model(x))
        seen.clear()
        actual = gradients(model, lambda: model(x))
    assert_equal_gradients(actual, gradients(model, lambda: model(x)))


def test_outputs_are_compared_on_devices_without_assertions_too(monkeypatch):
    def missing(*_):
        raise NotImplementedError

    monkeypatch.setattr("gradfree.torchside.private._assert_async", missing)
    test_a_refused_pass_leaves_the_next_pass_exact("batched=False")


def test_each_thread_has_its_own_structure():
    plan = RowPlan(Plain(), Settings([]))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: plan.structure).result() is not plan.structure
    assert plan.structure is plan.structure


class Loading(LayeredModel):
    """Its blocks have hooks that are methods of the whole model, which cannot be copied."""

    def __init__(self):
        super().__init__(*(Plain() for _ in range(L)))
        self.lock = Lock()
        for block in self.blocks:
            block.register_load_state_dict_pre_hook(self.around)
            block.register_load_state_dict_post_hook(self.around)
            block.register_state_dict_pre_hook(self.around)

    def around(self, *_):
        pass


def test_hooks_around_states_are_no_part_of_a_row():
    model, x = Loading(), torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with attach(model):
        assert is_row(model(x))
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)


class Gated(Plain):
    """Two weights with equal values, which may be mistaken for one another."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(6)) for _ in range(2))

    def forward(self, x):
        return x + self.first * torch.tanh(self.linear(x)) + self.second * torch.sin(x)


@pytest.mark.parametrize("which", [[2], range(L)])
def test_a_parameter_that_is_registered_again_keeps_its_gradient(which):
    """As the last one: weights that are pruned, or no longer normed, are."""
    model, x = net(Gated), torch.randn(4, 6)
    with attach(model, batched="auto"):
        gradients(model, lambda: model(x))
        for n in which:
            first = model.blocks[n].first
            del model.blocks[n].first
            model.blocks[n].first = first
        found = gradients(model, lambda: model(x))
    assert_equal_gradients(found, gradients(model, lambda: model(x)))


def test_weights_that_get_other_shapes_are_no_row_any_more():
    model, x = LayeredModel(*(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)) for _ in range(L))), torch.randn(4, 6)
    with attach(model, batched="auto"):
        gradients(model, lambda: model(x))
        wide, narrow = model.blocks[2]
        wide.weight.data, wide.bias.data, narrow.weight.data = wide.weight[:5], wide.bias[:5], narrow.weight[:, :5]
        found = gradients(model, lambda: model(x))
    assert_equal_gradients(found, gradients(model, lambda: model(x)))
