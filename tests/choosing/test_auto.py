"""``engine="auto"``: exact engines take turns in the first steps of a training, and the fastest stays."""

import gc
import io
import pickle
import weakref

import pytest
import torch
from oracles import assert_unchanged, snapshot
from torch import nn

import gradfree
from gradfree.chains.handle import Handle
from gradfree.choosing import switching
from gradfree.choosing.switching import SwitchingHandle

WAYS = ["Backprop()", "Backprop(plain=True)", "Newton()", "Shooting()"]
ENGINES = ["Backprop", None, "Newton", "Shooting"]


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def fresh():
    torch.manual_seed(0)
    return Sequences()


def wrapped(model):
    return gradfree.EngineOptimizer(torch.optim.AdamW(model.parameters(), 1e-2), model, "auto")


def train(model, *optimizers, steps, parts=1):
    """Return the engine that was attached in each backward pass."""
    seen = []
    for n in range(steps):
        model.zero_grad()
        torch.manual_seed(n)
        for x in torch.randn(4, 8, 3).chunk(parts):
            seen.append(on(model))
            model(x).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return seen


def on(model):
    """Return the engine that the layer is recorded for."""
    recorder = getattr(vars(model.rnn).get("forward"), "__self__", None)
    return type(recorder.attachment.engine).__name__ if recorder else None


@pytest.mark.parametrize(("units", "tried"), [(8, True), (9, False)])
def test_newton_takes_no_turn_on_wide_cell_layers(units, tried):
    handle = gradfree.create_engine("auto").attach(nn.ModuleDict({"rnn": gradfree.CellLayer(nn.GRUCell(3, units))}))
    assert ("Newton()" in handle.candidates) == tried
    assert "Shooting()" in handle.candidates
    handle.detach()


@pytest.fixture
def fastest(monkeypatch):
    """Let one candidate have the shortest times."""

    def be(number):
        times = {way: 1.0 + (n != number) for n, way in enumerate(WAYS)}
        monkeypatch.setattr(SwitchingHandle, "measured", lambda self: times)

    return be


@pytest.mark.parametrize("number", range(4))
def test_every_step_has_exact_gradients_and_the_fastest_engine_stays(fastest, number, logged):
    """Weights are those of autograd, also during the turns; accumulated gradients come from one engine."""
    fastest(number)
    model, plain = fresh(), fresh()
    optimizer = wrapped(model)
    assert optimizer.handle.candidates == WAYS
    seen = train(model, optimizer, steps=40, parts=2)
    train(plain, torch.optim.AdamW(plain.parameters(), 1e-2), steps=40, parts=2)
    assert seen[::2] == seen[1::2]
    assert seen[:72:2] == [engine for engine in ENGINES for _ in range(9)]
    assert set(seen[72:]) == {ENGINES[number]}
    assert optimizer.handle.chosen == WAYS[number]
    assert optimizer.handle.times == {way: 1.0 + (n != number) for n, way in enumerate(WAYS)}
    (line,) = logged
    assert line.startswith(f"auto takes {WAYS[number]}; a step: Backprop() ")
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()], rtol=1e-9, atol=1e-9)


def test_slow_outliers_and_the_first_step_of_a_turn_do_not_change_the_times(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(switching, "mark", lambda device: now[0])
    handle = SwitchingHandle({"one": Handle, "two": Handle}, {"": nn.Linear(1, 1)})
    for n in range(18):
        now[0] += 100.0 if n % 9 == 0 else 1.0 + n // 9 + 50.0 * (n % 4 == 1)
        handle.step_ended()
    assert handle.times == {"one": 1.0, "two": 2.0}
    assert handle.chosen == "one"


def test_only_the_first_of_the_models_own_optimizers_counts():
    model, other = fresh(), fresh()
    owned = (other.parameters(), model.rnn.parameters(), [model.rnn.weight_ih_l0])
    both = [torch.optim.SGD(parameters, 0.1) for parameters in owned]
    with gradfree.create_engine("auto").attach(model):
        assert train(model, *both, steps=10) == ["Backprop"] * 9 + [None]


@pytest.mark.parametrize("number", [1, 3])
def test_a_resumed_run_has_no_turns_and_equals_an_uninterrupted_one(fastest, number):
    """Bitwise; the state loads like weights."""
    fastest(number)
    model, resumed = fresh(), fresh()
    optimizer, again = wrapped(model), wrapped(resumed)
    train(model, optimizer, steps=37)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed.load_state_dict(weights)
    fastest((number + 1) % 4)
    again.load_state_dict(state)
    assert again.handle.chosen == optimizer.handle.chosen
    assert again.handle.times == optimizer.handle.times
    assert set(train(resumed, again, steps=9)) == {ENGINES[number]}
    train(model, optimizer, steps=9)
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


def test_a_refused_state_ends_no_turns():
    model = fresh()
    optimizer = wrapped(model)
    before = optimizer.handle.chosen, on(model)
    state = optimizer.state_dict()
    state["gradfree"] = {switching.KEY: {"way": "Shooting()", "times": {}}, "gru": {}}
    with pytest.raises(ValueError, match="no chains"):
        optimizer.load_state_dict(state)
    assert (optimizer.handle.chosen, on(model)) == before


def test_detaching_during_the_turns_restores_the_model_and_ends_the_turns():
    model = fresh()
    before = snapshot(model)
    handle = gradfree.create_engine("auto").attach(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    train(model, optimizer, steps=20)
    assert on(model) == "Newton"
    handle.attachments["rnn"].memory.of("newton")["pause"] = torch.zeros(2)
    assert handle.state_dict() == {}
    handle.detach()
    handle.detach()
    model.zero_grad()
    assert_unchanged(model, before)
    assert set(train(model, optimizer, steps=10)) == {None}


def test_a_deleted_model_is_freed():
    """Torch keeps the step counter for ever, but the counter only has weak references."""
    model = fresh()
    optimizer = wrapped(model)
    train(model, optimizer, steps=10)
    there = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert there() is None
    other = nn.Linear(1, 1)
    torch.optim.SGD(other.parameters(), 0.1).step()


def test_auto_validates_and_refuses_like_other_engines():
    engine, model = gradfree.create_engine("auto"), fresh()
    report = engine.validate(model)
    assert list(report.chains) == ["rnn"]
    assert report.notes == [f"these take turns over the first steps: {', '.join(WAYS)}"]
    with pytest.raises(gradfree.ChainError, match=r"Auto cannot be attached to Sequences:\n- the model has no .*'rn'"):
        engine.attach(model, ["rn"])
    assert pickle.loads(pickle.dumps(engine)) == engine
    with pytest.warns(UserWarning, match="Auto: nothing is attached.* no recurrent layer"):
        engine.attach(nn.Linear(3, 3)).detach()
