"""Settings that equal blocks share and that change later: gradients are autograd's, or an error is raised."""

import copy
from collections import deque
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import assert_equal_gradients
from gradfree.torchside.graph import walk

L, WIDTH = 6, 6


class Slotted:
    __slots__ = ("flags",)

    def __init__(self, flags):
        self.flags = flags


class Place:
    """Where blocks have their flags, with a different object for each test."""

    OF_CLASS = SimpleNamespace(flags={})

    def __init__(self, name):
        self.flags = {"trunk": True, "skip": False, "keep": False, "count": 0}
        self.holder = {
            "object": SimpleNamespace(flags=self.flags),
            "inside an object": SimpleNamespace(inner=[SimpleNamespace(flags=self.flags)]),
            "list": [0, self.flags],
            "dictionary": {"a": self.flags},
            "queue": deque([self.flags]),
            "object with slots": Slotted(self.flags),
            "global": None,
        }[name]
        Place.OF_CLASS.flags = self.flags


class Flagged(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.held = place.holder
        self.trunk, self.branch = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @property
    def flags(self):
        held = self.held
        if held is None:
            return Place.OF_CLASS.flags
        held = getattr(held, "inner", [held])[0]
        return (
            held.flags
            if isinstance(held, SimpleNamespace | Slotted)
            else held[-1]
            if isinstance(held, list | deque)
            else held["a"]
        )

    def forward(self, x):
        flags = self.flags
        with torch.set_grad_enabled(torch.is_grad_enabled() and flags["trunk"]):
            trunk = self.trunk(x)
        inner = torch.tanh(self.branch(x) + trunk)
        if flags["keep"]:
            self.kept = inner
        return torch.add(inner, x, alpha=0.3) + 0.7 * x.detach() if flags["skip"] else x + inner


def kept_by(model):
    """Return the sum of what blocks have stored in this pass."""
    return sum(block.kept.sum() for block in model if hasattr(block, "kept"))


CHANGES = {
    "a trunk is frozen": {"trunk": False},
    "another residual path": {"skip": True},
    "tensors are stored on blocks": {"keep": True},
    "nothing": {},
}
WATCHED = ("object", "inside an object", "list", "dictionary", "queue")
PLACES = (*WATCHED, "object with slots", "global")
ENGINES = {"highway_bp": {"iterations": L}, "highway_bp, 1": {"iterations": 1}, "fixed_point": {"iterations": L}}


def attached(model, name, batched):
    return gradfree.create_engine(name.partition(",")[0], **ENGINES[name]).attach(model, [""], batched=batched)


def outcome(model, x):
    """Return the gradients of a loss that also uses what blocks have stored."""
    for block in model:
        vars(block).pop("kept", None)
    model.zero_grad()
    (model(x).square().sum() + kept_by(model)).backward(retain_graph=True)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("batched", ["auto", True])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", PLACES)
def test_settings_that_change_later_give_the_gradients_one_by_one_or_an_error(where, change, name, batched):
    place, x = Place(where), torch.randn(4, WIDTH)
    model = nn.Sequential(*[Flagged(place) for _ in range(L)])
    with attached(model, name, batched):
        assert len(walk([model(x)]).nodes) < L, "no row"
        outcome(model, x)
        place.flags.update(CHANGES[change])
        refused, actual = None, None
        try:
            actual = outcome(model, x)
        except ChainError as error:
            refused = str(error)
    with attached(model, name, False):
        expected = outcome(model, x)
    if refused is None:
        assert_equal_gradients(actual, expected)
    else:
        stored, unseen = "keep" in CHANGES[change], where not in WATCHED or batched is True
        assert stored
        assert unseen
        assert "batched=" in refused
    if "," not in name:
        assert_equal_gradients(expected, outcome(model, x))


@pytest.mark.parametrize("change", [{"trunk": False}, {"skip": True}])
@pytest.mark.parametrize("where", PLACES)
def test_settings_that_change_between_the_passes_are_refused(where, change):
    place, x = Place(where), torch.randn(4, WIDTH)
    model = nn.Sequential(*[Flagged(place) for _ in range(L)])
    with attached(model, "highway_bp", "auto"):
        loss = model(x).sum()
        place.flags.update(change)
        with pytest.raises(ChainError, match="a setting that it reads has changed"):
            loss.backward()
        assert not any(p.grad is not None for p in model.parameters())
        outcome(model, x)
        assert (model[0].trunk.weight.grad is None) == ("trunk" in change)


def test_a_copy_of_an_attached_model_has_settings_of_its_own():
    place, x = Place("object"), torch.randn(4, WIDTH)
    model = nn.Sequential(*[Flagged(place) for _ in range(L)])
    with attached(model, "highway_bp", True):
        outcome(model, x)
        other = copy.deepcopy(model)
        outcome(other, x)
        other[0].held.flags["trunk"] = False
        assert all((g is None) == ("trunk" in name) for name, g in outcome(other, x).items())
        assert all(g is not None for g in outcome(model, x).values())


def test_settings_that_change_in_every_pass_end_in_single_blocks():
    place, x = Place("object"), torch.randn(4, WIDTH)
    model = nn.Sequential(*[Flagged(place) for _ in range(L)])
    with attached(model, "highway_bp", "auto"):
        for n in range(30):
            place.flags["count"] = object()
            rows = len(walk([model(x)]).nodes) < L
            assert rows == (n < 17)


def test_modes_that_alternate_and_settings_that_change_at_times_leave_a_row():
    place, x = Place("object"), torch.randn(4, WIDTH)
    model = nn.Sequential(*[Flagged(place) for _ in range(L)])
    with attached(model, "highway_bp", "auto"):
        for n in range(60):
            model.train(n % 2 == 0)
            if n % 3 == 0:
                place.flags["count"] = object()
            assert len(walk([model(x)]).nodes) < L


def test_what_stood_against_a_batch_can_be_mended():
    model, x = nn.Sequential(*[Silent(SimpleNamespace(rate=1.0)) for _ in range(L)]), torch.randn(4, WIDTH)
    with attached(model, "highway_bp", True):
        for inplace in (True, False):
            for block in model:
                block.act.inplace, block.shared = inplace, model[0].shared
            if inplace:
                with pytest.raises(ChainError, match="works in place"):
                    model(x)
        assert len(walk([model(x)]).nodes) < L


class Counting(Flagged):
    def forward(self, x):
        self.flags["count"] += 1
        return super().forward(x)


def test_blocks_that_change_their_shared_settings_run_one_by_one_and_once():
    place, x = Place("object"), torch.randn(4, WIDTH)
    model = nn.Sequential(*[Counting(place) for _ in range(L)])
    with attached(model, "highway_bp", "auto"):
        outcome(model, x)
        assert place.flags["count"] == L
    with attached(model, "highway_bp", True), pytest.raises(ChainError, match="stores tensors or counts"):
        model(x)


OUTSIDE = {"scale": 1.0, "frozen": set(), "calls": 0}


class Outside(Flagged):
    """Reads variables outside that change gradients and no outputs."""

    def forward(self, x):
        y = self.branch(x)
        y = y.detach() if self.trunk in OUTSIDE["frozen"] else y
        y = y * OUTSIDE["scale"] + y.detach() * (1 - OUTSIDE["scale"])
        return x + torch.tanh(y)


class Counted(Flagged):
    """Does not train its third call."""

    def forward(self, x):
        OUTSIDE["calls"] += 1
        y = torch.tanh(self.branch(x))
        return x + (y.detach() if OUTSIDE["calls"] % L == 3 else y)


@pytest.fixture
def outside():
    yield OUTSIDE
    OUTSIDE.update(scale=1.0, frozen=set(), calls=0)


@pytest.mark.parametrize("batched", ["auto", True])
def test_blocks_that_compute_in_different_ways_run_one_by_one_or_are_refused(batched, outside):
    model, x = nn.Sequential(*[Outside(Place("global")) for _ in range(L)]), torch.randn(4, WIDTH)
    for n in (2, 4):
        outside["frozen"] = {model[n].trunk}
        expected = outcome(model, x)
        with attached(model, "fixed_point", batched):
            if batched is True:
                with pytest.raises(ChainError, match="by different operations"):
                    model(x)
            else:
                assert_equal_gradients(outcome(model, x), expected)


@pytest.mark.parametrize("batched", ["auto", True])
def test_blocks_that_count_outside_run_one_by_one_or_are_refused(batched, outside):
    model, x = nn.Sequential(*[Counted(Place("global")) for _ in range(L)]), torch.randn(4, WIDTH)
    expected = outcome(model, x)
    with attached(model, "fixed_point", batched):
        if batched is True:
            with pytest.raises(ChainError, match="stores tensors or counts"):
                model(x)
            return
        model(x)  # Looks at the blocks, which counts, too.
        outside["calls"] = 0
        assert_equal_gradients(outcome(model, x), expected)


def test_a_variable_outside_that_changes_between_the_passes_is_refused(outside):
    model, x = nn.Sequential(*[Outside(Place("global")) for _ in range(L)]), torch.randn(4, WIDTH)
    with attached(model, "fixed_point", True):
        loss = model(x).square().sum()
        outside["scale"] = 0.5
        with pytest.raises(ChainError, match="a setting that it reads has changed"):
            loss.backward()


class Silent(nn.Module):
    """Adds nothing yet, so that no output shows a setting; the gradient of the gain depends on all."""

    def __init__(self, shared, scale=None):
        super().__init__()
        self.shared, self.scale = shared, scale
        self.read, self.norm, self.act = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.LeakyReLU()
        self.gain = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        y = self.norm(self.read(x)) * self.shared.rate
        return x + self.gain * self.act(y if self.scale is None else self.scale(y))


@pytest.mark.parametrize(("layer", "name", "value"), [("act", "negative_slope", 0.5), ("norm", "eps", 1.0)])
def test_a_setting_of_torchs_layers_that_changes_between_two_steps_counts(layer, name, value):
    shared, x = SimpleNamespace(rate=1.0), torch.randn(4, WIDTH)
    model = nn.Sequential(*[Silent(shared) for _ in range(L)])
    with attached(model, "highway_bp", "auto"):
        assert len(walk([model(x)]).nodes) < L, "no row"
        outcome(model, x)
        for block in model:
            setattr(getattr(block, layer), name, value)
        actual = outcome(model, x)
    assert_equal_gradients(actual, outcome(model, x))


class Stopped(Silent):
    """Has the same outputs, and no gradient of its branch."""

    def forward(self, x):
        return super().forward(x) + x - x.detach()


def stop_one(model):
    model[3].__class__ = Stopped


def tie_weights(model):
    for block in model:
        block.gain = block.read.bias


@pytest.mark.parametrize("change", [stop_one, tie_weights])
def test_a_block_of_another_class_and_weights_tied_later_run_one_by_one(change):
    shared, x = SimpleNamespace(rate=1.0), torch.randn(4, WIDTH)
    model = nn.Sequential(*[Silent(shared) for _ in range(L)])
    with attached(model, "highway_bp", "auto"):
        outcome(model, x)
        change(model)
        assert len(walk([model(x)]).nodes) > L
        actual = outcome(model, x)
    assert_equal_gradients(actual, outcome(model, x))


@pytest.mark.parametrize("by_function", [False, True])
def test_a_shared_setting_that_differs_between_two_passes_of_one_loss_is_refused(by_function):
    shared, x = SimpleNamespace(rate=1.0), torch.randn(4, WIDTH)
    if by_function:
        config, own = shared, SimpleNamespace(rate=1.0)
        blocks = [Silent(own, scale) for scale in [lambda y: y * config.rate] * L]
    else:
        blocks = [Silent(shared) for _ in range(L)]
    model = nn.Sequential(*blocks)
    with attached(model, "highway_bp", "auto"):
        first = model(x).sum()
        shared.rate = 4.0
        with pytest.raises(ChainError, match="a setting that it reads has changed"):
            (first + model(x).sin().sum()).backward()


def test_a_backward_pass_in_another_thread_takes_the_settings_of_its_forward_pass():
    """As that of a GPU is: each thread has a copy of the structure."""
    shared, x, found = SimpleNamespace(rate=1.0), torch.randn(4, WIDTH), []
    for batched in ("auto", False):
        torch.manual_seed(0)
        model = nn.Sequential(*[Silent(shared) for _ in range(L)])
        with attached(model, "highway_bp", batched):
            loss = model(x).sum()
            for block in model:
                block.act.negative_slope = 0.5
            loss = loss + model(x).sin().sum()
            thread = Thread(target=loss.backward)
            thread.start()
            thread.join()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal_gradients(*found)


def test_looking_at_blocks_draws_no_random_numbers():
    class Noisy(nn.Linear):
        def forward(self, x):
            return x + torch.tanh(super().forward(x)) * torch.rand(())

    model, x, drawn = nn.Sequential(*[Noisy(WIDTH, WIDTH) for _ in range(L)]), torch.randn(4, WIDTH), []
    for batched in (False, "auto"):
        torch.manual_seed(0)
        with attached(model, "fixed_point", batched):
            drawn.append((model(x), torch.rand(())))
    torch.testing.assert_close(*drawn, rtol=0, atol=0)


def test_a_tensor_that_needs_a_gradient_late_is_refused_in_a_row():
    """One by one, the blocks would refuse it, too: it is no argument and no parameter."""
    scale = torch.ones(())

    class Untraceable(nn.Linear):
        def forward(self, x):
            return x + scale * torch.tanh(super().forward(x)) * float(range(len(x)).step)

    model, x = nn.Sequential(*[Untraceable(WIDTH, WIDTH) for _ in range(L)]), torch.randn(4, WIDTH)
    with attached(model, "fixed_point", True):
        model(x).sum().backward()
        scale.requires_grad_()
        with pytest.raises(ChainError, match="use a tensor that needs a gradient and is not one of their parameters"):
            model(x).sum().backward()
