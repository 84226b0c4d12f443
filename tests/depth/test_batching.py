"""Blocks that are alike run without a graph, and are pulled through in batches: the same gradients, or a refusal."""

import copy
import pickle

import pytest
import torch
from pairwise import pairwise
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree.depth import batching
from gradfree.errors import ChainError
from gradfree.testing.cases.models import Model, Plain, assert_equal_gradients, gradients

ENGINES = {
    "highway_bp": {"iterations": 9},
    "fixed_point": {"iterations": 9},
    "truncated": {"window": 9},
    "dsf": {"iterations": 9},
}
TAPS = {"last": (8,), "all": tuple(range(9)), "first": (0,), "inner": (2, 5)}


class Other(Plain):
    def forward(self, x):
        return x + torch.sigmoid(self.linear(x))


class Scaled(Plain):
    def __init__(self, width=6, scale=1.0):
        super().__init__(width)
        self.scale = scale

    def forward(self, x):
        return x + self.scale * torch.tanh(self.linear(x))


def alike():
    return [Plain() for _ in range(9)]


def mixed():
    dropout = nn.Sequential(Plain(), nn.Dropout(0.0))
    return [Plain(), Other(), Plain(), Plain(), dropout, Other(), Scaled(scale=0.5), Plain(), Scaled(scale=0.5)]


def tied():
    blocks = alike()
    blocks[3].linear.weight = blocks[6].linear.weight
    return blocks


def frozen():
    blocks = alike()
    for i in (0, 4, 5):
        blocks[i].requires_grad_(False)
    blocks[7].linear.bias.requires_grad_(False)
    return blocks


BLOCKS = {"alike": alike, "mixed": mixed, "tied": tied, "frozen": frozen}


def attach(model, name="highway_bp", batched=True, **options):
    engine = gradfree.create_engine(name, **(options or ENGINES[name]))
    return engine.attach(model, ["blocks"], batched=batched)


def in_batches(handle):
    return str(handle.chains["blocks"])


@pairwise(name=ENGINES, kind=BLOCKS, taps=TAPS, passes=[1, 2])
def test_exact_where_it_was_and_bitwise_the_same_from_the_first_pass_on(name, kind, taps, passes):
    """With taps, tied and frozen parameters, groups of unequal blocks, several passes before one backward."""
    model, xs = Model(BLOCKS[kind](), 6), [torch.randn(4, 6) for _ in range(passes)]

    def loss():
        return sum(model(x, taps=TAPS[taps]).square().sum() for x in xs)

    outs, expected = [model(x) for x in xs], gradients(model, loss)
    with attach(model, name, batched="auto") as handle:
        first, second = gradients(model, loss), gradients(model, loss)
        assert all(torch.equal(model(x), out) for x, out in zip(xs, outs, strict=True))
        assert "in batches" in in_batches(handle)
    assert_equal_gradients(second, expected)
    assert all(torch.equal(first[n], second[n]) for n in first if first[n] is not None)


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("name", ["highway_bp", "fixed_point", "dsf"])
def test_inexact_sweeps_give_what_they_give_one_by_one(name, k):
    model, x = Model(mixed(), 6), torch.randn(4, 6)
    with attach(model, name, batched=False, iterations=k):
        expected = gradients(model, lambda: model(x, taps=(3, 8)))
    with attach(model, name, batched="auto", iterations=k) as handle:
        assert_equal_gradients(gradients(model, lambda: model(x, taps=(3, 8))), expected)
        assert_equal_gradients(gradients(model, lambda: model(x, taps=(3, 8))), expected)
        assert "in batches" in in_batches(handle)


def test_a_group_that_is_too_large_is_cut_into_several(monkeypatch):
    monkeypatch.setattr(batching, "_BYTES", 1000)
    model, x = Model(alike(), 6), torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with attach(model):
        for _ in range(2):
            assert_equal_gradients(gradients(model, lambda: model(x)), expected)


def test_accumulation_and_retain_graph():
    model, x = Model(alike(), 6), torch.randn(4, 6)
    (3 * model(x).sum()).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with attach(model):
        for _ in range(2):
            model.zero_grad()
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            model(x).sum().backward()
            assert_equal_gradients({n: p.grad for n, p in model.named_parameters() if n in expected}, expected)
            with pytest.raises(RuntimeError, match="a second time"):
                loss.backward()


def test_autocast_runs_them_as_in_the_forward_pass():
    model, x = Model(alike(), 6).float(), torch.randn(4, 6, dtype=torch.float32)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return out.float().sum()

    with attach(model, batched=False):
        expected = gradients(model, loss)
    with attach(model):
        for _ in range(2):
            assert_equal_gradients(gradients(model, loss), expected, tolerance=0.02)


def test_a_checkpoint_around_the_model_or_inside_blocks():
    class Checkpointed(Plain):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    x = torch.randn(4, 6)
    around, inside = Model(alike(), 6), Model([Checkpointed() for _ in range(9)], 6)
    for model, run in ((around, lambda: checkpoint(around, x, use_reentrant=False)), (inside, lambda: inside(x))):
        expected = gradients(model, run)
        with attach(model, batched="auto"):
            for _ in range(2):
                assert_equal_gradients(gradients(model, run), expected)


class Counting(Plain):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Random(Plain):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5))


class ByValue(Plain):
    def forward(self, x):
        return super().forward(x) if x.abs().sum() > 0 else x


class Hooked(Plain):
    def forward(self, x):
        branch = torch.tanh(self.linear(x))
        if branch.requires_grad:
            branch.register_hook(lambda g: 0.5 * g)
        return x + branch


HINDRANCES = {
    "dropout": (lambda: nn.Sequential(Plain(), nn.Dropout(0.5)), "draws a new mask"),
    "statistics": (lambda: nn.Sequential(Plain(), nn.BatchNorm1d(6)), "counts its batches"),
    "a mask of its own": (Random, "does not run in a batch"),
    "a branch on values": (ByValue, "does not run in a batch"),
    "a counter": (Counting, "changes what it holds|no other block is like it"),
}


@pytest.mark.parametrize("kind", HINDRANCES)
def test_blocks_that_cannot_go_the_way_they_went_and_batched_true_names_them(kind):
    make, why = HINDRANCES[kind]
    model, x = Model([make() for _ in range(4)], 6), torch.randn(8, 6)
    torch.manual_seed(1)
    expected = gradients(model, lambda: model(x))
    with attach(model, "fixed_point", batched="auto"):
        for _ in range(2):
            torch.manual_seed(1)
            assert_equal_gradients(gradients(model, lambda: model(x)), expected)
    with (
        attach(model, "fixed_point"),
        pytest.raises(ChainError, match=rf"batched=True, but blocks\.0 cannot .*({why})"),
    ):
        [model(x).sum().backward() for _ in range(2)]  # What changes in the first pass may stay as it is.


def test_a_hook_inside_the_blocks_is_kept():
    """A batch that would lose it gives something else than the blocks' own graphs, and is not used."""
    model, x = Model([Hooked() for _ in range(4)], 6), torch.randn(8, 6)
    expected = gradients(model, lambda: model(x))
    with attach(model, batched="auto"):
        for _ in range(2):
            assert_equal_gradients(gradients(model, lambda: model(x)), expected)


def test_modes_and_frozen_parameters_may_change_from_pass_to_pass():
    model, x = Model([nn.Sequential(Plain(), nn.Dropout(0.5)) for _ in range(4)], 6), torch.randn(8, 6)
    with attach(model, batched="auto") as handle:
        for training, trained in ((True, True), (False, True), (True, True), (False, False)):
            model.train(training)
            model.blocks[1].requires_grad_(trained)
            torch.manual_seed(1)
            actual = gradients(model, lambda: model(x))
            torch.manual_seed(1)
            with handle.exactly():
                assert_equal_gradients(actual, gradients(model, lambda: model(x)))


@pytest.mark.parametrize("what", ["parameter", "state"])
def test_changes_in_place_before_the_backward_pass_are_refused(what):
    model, x = Model(alike(), 6), torch.randn(4, 6)
    kept = []
    model.blocks[3].register_forward_hook(lambda block, args, out: kept.append(out))
    with attach(model, batched="auto"):
        gradients(model, lambda: model(x))
        loss = model(x).sum()
        with torch.no_grad():
            (model.blocks[2].linear.weight if what == "parameter" else kept[-1]).mul_(2)
        with pytest.raises(ChainError, match=r"in place|inplace"):
            loss.backward()


def test_an_interrupted_block_leaves_gradients_on():
    class Interrupted(Plain):
        stop = False

        def forward(self, x):
            if Interrupted.stop:
                raise KeyboardInterrupt
            return super().forward(x)

    model, x = Model([Interrupted() for _ in range(4)], 6), torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with attach(model):
        gradients(model, lambda: model(x))
        Interrupted.stop = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        Interrupted.stop = False
        assert torch.is_grad_enabled()
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)


def test_a_copy_trains_by_itself_and_a_pickle_is_the_users_own():
    model, x = Model(alike(), 6), torch.randn(4, 6)
    with attach(model):
        expected = gradients(model, lambda: model(x))
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for _ in range(2):
            assert_equal_gradients(gradients(copied, lambda: copied(x)), expected)
        assert "forward" not in vars(pickled.blocks[0])
    assert "forward" not in vars(model.blocks[0])


def test_who_may_ask_for_it():
    model = Model(alike(), 6)
    with pytest.raises(ValueError, match="batched must be 'auto', True or False, not 'yes'"):
        gradfree.create_engine("highway_bp").attach(model, ["blocks"], batched="yes")
    with pytest.raises(ChainError, match="Backprop"):
        gradfree.create_engine("backprop", plain=False).attach(model, ["blocks"], batched=True)
    with pytest.raises(ChainError, match="no chain of blocks in depth"):
        gradfree.create_engine("highway_bp").attach(nn.GRU(3, 3), [""], batched=True)


CHANGES = {
    "a number": lambda blocks: setattr(blocks[3], "scale", 0.5),
    "what a list holds": lambda blocks: blocks[3].steps.__setitem__(0, 0.5),
    "a layer": lambda blocks: setattr(blocks[3], "linear", nn.Linear(6, 6, bias=False)),
    "all numbers": lambda blocks: [setattr(block, "scale", 0.3) for block in blocks],
}

# A layer that is exchanged splits the chain at its block.
IN_BATCHES = {"a number": 8, "what a list holds": 8, "a layer": 3, "all numbers": 9}


class Stepped(Scaled):
    def __init__(self):
        super().__init__()
        self.steps = [1.0]

    def forward(self, x):
        return x + self.steps[0] * (super().forward(x) - x)


@pytest.mark.parametrize("change", CHANGES)
def test_what_blocks_hold_may_change_from_pass_to_pass(change, monkeypatch):
    """Also where they are no longer alike: those that are go on in batches, and gradients stay exact."""
    monkeypatch.setattr(batching, "pays", lambda *_: True)
    model, x = Model([Stepped() for _ in range(9)], 6), torch.randn(4, 6)
    plain = copy.deepcopy(model)
    with attach(model, batched="auto", iterations=9) as handle:
        for passes in range(4):
            if passes == 2:
                CHANGES[change](model.blocks)
                CHANGES[change](plain.blocks)
                plain.load_state_dict(model.state_dict())
            assert_equal_gradients(gradients(model, lambda: model(x)), gradients(plain, lambda: plain(x)))
        assert f"{IN_BATCHES[change]} in batches" in in_batches(handle)


def test_blocks_that_read_what_has_changed_elsewhere_are_refused():
    """A forward pass that a batch cannot follow: a number that only one block reads, outside of all of them."""
    outside = {"scale": 1.0}

    class Reading(Plain):
        def forward(self, x):
            return x + outside["scale"] * torch.tanh(self.linear(x)) if self is last else super().forward(x)

    blocks = [Reading() for _ in range(5)]
    last = None
    model, x = Model(blocks, 6), torch.randn(4, 6)
    with attach(model):
        for _ in range(2):
            gradients(model, lambda: model(x))
        last, outside["scale"] = blocks[-1], 0.5
        with pytest.raises(ChainError, match=r"blocks\.0 to blocks\.4 gave other outputs .* Attach with batched=False"):
            gradients(model, lambda: model(x))


def test_a_chain_that_is_the_whole_model_needs_no_gradient_at_its_input():
    model, x = nn.Sequential(nn.Sequential(*alike())), torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with gradfree.create_engine("highway_bp", iterations=9).attach(model, ["0"], batched=True) as handle:
        for _ in range(2):
            assert_equal_gradients(gradients(model, lambda: model(x)), expected)
        assert "9 in batches" in str(handle.chains["0"])


def test_states_that_are_not_finite_go_through_batches_as_one_by_one():
    """A scaler must see what autograd gives; that a batch has the forward pass' outputs counts NaN as equal to NaN."""
    model, x = Model(alike(), 6), torch.randn(4, 6)
    with attach(model):
        for _ in range(2):
            gradients(model, lambda: model(x))
        x[0] = float("inf")
        assert all(g.isnan().any() for n, g in gradients(model, lambda: model(x)).items() if "blocks" in n)


KEPT = []


class Keeping(Plain):
    """Keeps a tensor that depends on its state, or on its weights too, outside of itself or as an attribute."""

    def __init__(self, how):
        super().__init__()
        self.how, self.aside = how, {}

    def forward(self, x):
        inner = torch.tanh(self.linear(x))
        kept = {"state": x, "inside": inner.detach() * self.linear.weight.sum(), "attribute": x}[self.how]
        if self.how == "attribute":
            self.aside["kept"] = kept.pow(2).sum()
        else:
            KEPT.append(kept.pow(2).sum())
        return x + inner


@pytest.mark.parametrize("how", ["state", "inside", "attribute"])
def test_blocks_that_keep_tensors_for_a_loss_go_one_by_one(how, monkeypatch):
    """Without a graph the loss on them would have no gradient, and nobody would be told."""
    monkeypatch.setattr(batching, "pays", lambda *_: True)
    model, x = Model([Keeping(how) for _ in range(5)], 6), torch.randn(4, 6)

    def loss():
        KEPT.clear()
        out = model(x)
        kept = [block.aside["kept"] for block in model.blocks] if how == "attribute" else KEPT
        return torch.stack([out.pow(2).sum(), *kept]).sum()

    expected = gradients(model, loss)
    with attach(model, batched="auto", iterations=5) as handle:
        for _ in range(3):
            assert_equal_gradients(gradients(model, loss), expected)
        assert "0 in batches; blocks.0 and others not: " in in_batches(handle)
