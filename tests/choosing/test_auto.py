"""``engine="auto"``: exact engines take turns over the first steps of a training, and the fastest stays."""

import gc
import io
import logging
import pickle
import warnings
import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from oracles import assert_unchanged, snapshot
from torch import nn

import gradfree
from gradfree.algorithms import Backprop
from gradfree.choosing.turns import Turns
from gradfree.engines.engine import Engine
from gradfree.testing.cases.models import plain_model

BATCHED, SHOOTING = "Backprop()", "Shooting()"


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def fresh():
    torch.manual_seed(0)
    return Sequences()


def wrapped(model, engine="auto", **options):
    return gradfree.EngineOptimizer(torch.optim.AdamW(model.parameters(), 1e-2), model, engine, **options)


def train(model, optimizer, steps, parts=1):
    """Return what was on the model in each backward pass."""
    seen = []
    for n in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(n)
        for x in torch.randn(4, 8, 3).chunk(parts):
            seen.append(on(model))
            model(x).pow(2).sum().backward()
        optimizer.step()
    return seen


def on(model):
    """Return the engine that the layer is recorded for."""
    recorder = getattr(vars(model.rnn).get("forward"), "__self__", None)
    return type(recorder.attachment.engine).__name__ if recorder else None


@pytest.fixture
def fastest(monkeypatch):
    """Let a way be the fastest that would have been timed so."""

    def be(number):
        monkeypatch.setattr(Turns, "_drop_slowest", lambda self: None)
        monkeypatch.setattr(Turns, "times", lambda self: [1.0 + (way != number) for way in range(len(self._times))])

    return be


def test_every_step_is_one_of_exact_training_whoever_has_it(fastest):
    """Weights are those of plain backpropagation, turns included, and all engines for such chains have had turns."""
    fastest(3)
    model, plain = fresh(), fresh()
    optimizer = wrapped(model)
    seen = train(model, optimizer, 60)
    train(plain, torch.optim.AdamW(plain.parameters(), 1e-2), 60)
    assert seen[:12] == ["Backprop"] * 3 + [None] * 3 + ["Newton"] * 3 + ["Shooting"] * 3
    assert seen[48:] == ["Shooting"] * 12
    assert optimizer.handle.chosen == SHOOTING
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_fastest_stays_and_is_told_once(fastest, caplog):
    fastest(0)
    model = fresh()
    optimizer = wrapped(model)
    with caplog.at_level(logging.INFO, "gradfree"):
        seen = train(model, optimizer, 52)
    assert seen[48:] == ["Backprop"] * 4
    (line,) = caplog.messages
    assert line.startswith("auto takes Backprop(); a step: Backprop() 1e+03 ms, Backprop(plain=True) 2e+03 ms, New")
    assert optimizer.handle.times == {"Backprop(plain=True)": 2.0, BATCHED: 1.0, "Newton()": 2.0, SHOOTING: 2.0}
    assert max(optimizer.handle.errors.values()) < 1e-10


def test_figures_tell_whose_turn_it_is_and_what_was_taken(fastest):
    """By the way's number; plain backpropagation and what is left to torch have no chain that could tell."""
    fastest(3)
    model = fresh()
    optimizer = wrapped(model)
    assert optimizer.handle.ways == [BATCHED, "Backprop(plain=True)", "Newton()", SHOOTING]
    told = []
    for _ in range(50):
        with gradfree.engine_figures() as figures:
            told.append(int(optimizer.handle.figures["way"]))
            train(model, optimizer, 1)
        seen = [chain["way"].item() for chain in figures.values()]
        assert seen in {0: [[0]], 1: [[]]}.get(told[-1], [[], [told[-1]]])
    assert told[:12] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert told[48:] == [3, 3]


def test_engines_change_between_steps_alone(fastest):
    fastest(0)
    model = fresh()
    seen = train(model, wrapped(model), 50, parts=2)
    assert seen[::2] == seen[1::2]
    assert set(seen) == {None, "Backprop", "Newton", "Shooting"}


def test_no_step_no_turn():
    """What no optimizer steps on is backpropagation's, as is what another model's optimizer does."""
    model, other = fresh(), fresh()
    with gradfree.create_engine("auto").attach(model) as handle:
        optimizer = torch.optim.SGD(other.parameters(), 0.1)
        for _ in range(9):
            model(torch.randn(2, 5, 3)).sum().backward()
            other(torch.randn(2, 5, 3)).sum().backward()
            optimizer.step()
            assert on(model) == "Backprop"
        assert handle.chosen is None


def test_of_several_optimizers_the_first_counts():
    model = fresh()
    both = [torch.optim.SGD(model.rnn.parameters(), 0.1), torch.optim.SGD([model.rnn.weight_ih_l0], 0.1)]
    seen = []
    with gradfree.create_engine("auto").attach(model):
        for _ in range(4):
            seen.append(on(model))
            model(torch.randn(2, 5, 3)).sum().backward()
            for optimizer in both:
                optimizer.step()
    assert seen == ["Backprop"] * 3 + [None]


@pytest.mark.parametrize("number", range(4))
def test_a_resumed_run_times_nothing_and_is_the_uninterrupted_one(fastest, number):
    """To the last bit; the state loads as weights do."""
    fastest(number)
    model, resumed = fresh(), fresh()
    optimizer, again = wrapped(model), wrapped(resumed)
    train(model, optimizer, 50)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed.load_state_dict(weights)
    fastest((number + 1) % 4)
    again.load_state_dict(state)
    assert again.handle.chosen == optimizer.handle.chosen
    assert again.handle.times == optimizer.handle.times
    assert set(train(resumed, again, 50)) == {["Backprop", None, "Newton", "Shooting"][number]}
    train(model, optimizer, 50)
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


def test_a_checkpoint_from_between_the_turns_has_them_taken_anew():
    model = fresh()
    optimizer = wrapped(model)
    train(model, optimizer, 11)
    state = optimizer.state_dict()
    resumed = fresh()
    again = wrapped(resumed)
    again.load_state_dict(state)
    assert again.handle.chosen is None
    assert train(resumed, again, 4) == ["Backprop"] * 3 + [None]
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(state)


def test_a_choice_that_does_not_fit_is_told_and_turns_are_taken(fastest):
    fastest(3)
    model, deep = fresh(), plain_model()
    optimizer = wrapped(model)
    train(model, optimizer, 50)
    other = gradfree.create_engine("auto").attach(deep)
    with pytest.warns(UserWarning, match=r"has chosen Shooting\(\), which does not fit here: Backprop\(\) take"):
        other.load_state_dict(optimizer.handle.state_dict())


@dataclass(frozen=True, kw_only=True)
class Off(Backprop):
    """Claims to be exact, and is off by a part of the gradient."""

    by: float = 1e-3
    offers: ClassVar = (0.0,)

    @classmethod
    def as_exact_as(cls, tolerance):
        return [cls(by=by, plain=False) for by in cls.offers]

    def gradients(self, chain, direct):
        exact = chain.backpropagate(direct)
        return exact._replace(parameters=[None if g is None else g * (1 + self.by) for g in exact.parameters])


@pytest.mark.parametrize(
    ("by", "tolerance", "taken"),
    [(1e-9, None, True), (1e-3, None, False), (1e-3, 1e-2, True), (1e-1, 1e-2, False), (float("nan"), 1e-2, False)],
)
def test_what_is_further_off_than_allowed_is_not_taken(fastest, monkeypatch, by, tolerance, taken):
    """However fast; and its first step, in which that is found out, gets backpropagation's gradient."""
    kinds = {"plain": Backprop, "off": type("Off", (Off,), {"offers": (by,)})}
    monkeypatch.setattr("gradfree.algorithms.around.auto.list_engines", lambda: list(kinds))
    monkeypatch.setattr("gradfree.algorithms.around.auto.engine_class", kinds.get)
    fastest(2)
    model, plain = fresh(), fresh()
    optimizer = wrapped(model, tolerance=tolerance)
    train(model, optimizer, 7)
    train(plain, torch.optim.AdamW(plain.parameters(), 1e-2), 7)
    torch.testing.assert_close(model.rnn.weight_hh_l0, plain.rnn.weight_hh_l0, rtol=1e-9, atol=1e-9)
    train(model, optimizer, 29)
    assert optimizer.handle.chosen.startswith("Off(" if taken else "Backprop(")
    if by == by:
        assert max(optimizer.handle.errors.values()) == pytest.approx(by, rel=0.2)


def test_approximate_engines_take_part_at_a_tolerance_alone():
    deep = plain_model()
    assert gradfree.create_engine("auto").attach(deep).ways == ["Backprop()"]
    with gradfree.create_engine("auto", tolerance=1e-2).attach(deep) as handle:
        names = handle.ways
    assert names == ["Backprop()", "FixedPoint(tolerance=0.01)", "HighwayBP(tolerance=0.01)"]


@pytest.mark.parametrize("engine", ["highway_bp", "fixed_point"])
def test_a_chain_in_depth_can_be_compared(fastest, engine):
    """Its graphs, walked twice in that step, are there for the second time."""
    fastest(["", "fixed_point", "highway_bp"].index(engine))
    model, x = plain_model(), torch.randn(4, 6)
    optimizer = wrapped(model, tolerance=1e-6)
    for _ in range(40):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
    assert optimizer.handle.chosen == f"{'HighwayBP' if engine == 'highway_bp' else 'FixedPoint'}(tolerance=1e-06)"


def test_that_it_attaches_to_nothing_is_said_with_what_could_be_named():
    with pytest.warns(UserWarning, match="nothing is attached.*plain=False takes 'blocks'"):
        gradfree.create_engine("auto").attach(plain_model()).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = gradfree.create_engine("auto", tolerance=1e-3).attach(plain_model())
        assert len(handle.ways) > 1
        handle.detach()


def test_detached_in_the_middle_nothing_is_left():
    model = fresh()
    before = snapshot(model)
    handle = gradfree.create_engine("auto").attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    train(model, optimizer, 10)
    assert on(model) == "Shooting"
    handle.detach()
    handle.detach()
    model.zero_grad()
    assert_unchanged(model, before)
    assert set(train(model, optimizer, 10)) == {None}


def test_a_model_that_is_gone_is_gone():
    """Torch holds what counts the steps for ever, which holds nothing."""
    model = fresh()
    optimizer = wrapped(model)
    train(model, optimizer, 10)
    there = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert there() is None
    other = nn.Linear(1, 1)
    torch.optim.SGD(other.parameters(), 0.1).step()


def test_it_is_refused_like_any_other():
    engine, model = gradfree.create_engine("auto"), fresh()
    with pytest.raises(gradfree.ChainError, match=r"Auto cannot be attached to Sequences:\n- the model has no .*'rn'"):
        engine.attach(model, ["rn"])
    assert pickle.loads(pickle.dumps(engine)) == engine


def test_validate_names_who_takes_part():
    report = gradfree.create_engine("auto").validate(fresh())
    assert list(report.chains) == ["rnn"]
    assert report.notes == [
        "these take turns over the first steps: Backprop(), Backprop(plain=True), Newton(), Shooting()"
    ]
    assert isinstance(gradfree.create_engine("auto").engines[0], Engine)
