"""EngineOptimizer behaves like the optimizer that it wraps."""

import copy
import pickle

import pytest
import torch
from oracles import assert_unchanged, snapshot
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import plain_model

HIGHWAY = gradfree.create_engine("highway_bp")


def train(model, optimizer, x, steps, scheduler=None):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


def wrapped(model, engine="backprop", optimizer=None, **options):
    return gradfree.EngineOptimizer(optimizer or torch.optim.AdamW(model.parameters(), 1e-2), model, engine, **options)


def assert_same(actual, expected):
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_its_state_loads_into_a_plain_optimizer_and_back():
    model, x = plain_model(), torch.randn(4, 6)
    optimizer = wrapped(model)
    train(model, optimizer, x, 3)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, x, 3)
    resumed = plain_model()
    resumed.load_state_dict(weights)
    plain = torch.optim.AdamW(resumed.parameters(), 1.0)
    plain.load_state_dict(state)
    again = wrapped(resumed)
    again.load_state_dict(plain.state_dict())
    assert_same(train(resumed, again, x, 3), expected)
    assert again.state[next(resumed.parameters())]["step"] == 6


def test_a_residual_path_can_be_declared():
    assert wrapped(plain_model(), "highway_bp", residual=0.5).handle.chains["blocks"].declared == 0.5


def test_a_closure_is_called_as_the_wrapped_optimizer_calls_it():
    model, x, calls = plain_model(), torch.randn(4, 6), []
    optimizer = gradfree.EngineOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3), model, "highway_bp")

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    first = optimizer.step(closure)
    assert first == calls[0]
    assert len(calls) > 1
    assert calls[-1] < calls[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_gradscaler_unscales_and_skips_steps_on_overflow(overflow, fused):
    model, x = plain_model().float(), torch.randn(4, 6, dtype=torch.float32)
    other = copy.deepcopy(model)
    kind, options = (torch.optim.SGD, {"momentum": 0.9, "fused": True}) if fused else (torch.optim.AdamW, {})
    plain = kind(model.parameters(), 1e-2, **options)
    optimizer = wrapped(other, optimizer=kind(other.parameters(), 1e-2, **options))
    for m, o in ((model, plain), (other, optimizer)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        loss = m(x).pow(2).sum() * (float("inf") if overflow else 1.0)
        scaler.scale(loss).backward()
        scaler.step(o)
        scaler.update()
        assert scaler.get_scale() == (2.0**15 if overflow else 2.0**16)
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert bool(optimizer.state) != overflow


def test_copies_are_refused():
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied; copy the model and its \.optimizer"):
            copying(wrapped(plain_model()))


@pytest.mark.parametrize("name", ["state", "param_groups", "defaults"])
def test_what_is_set_on_the_wrapper_is_set_on_the_wrapped_optimizer(name):
    """As when programs unfreeze layers, or reset Adam between tasks."""
    optimizer, given = wrapped(plain_model()), {}
    setattr(optimizer, name, given)
    assert getattr(optimizer.optimizer, name) is given
    assert name not in vars(optimizer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: wrapped(m, optimizer=m), "optimizer must be a torch.optim.Optimizer, not a Model."),
        (lambda m: wrapped(nn.Linear(2, 2), optimizer=torch.optim.SGD(m.parameters(), 0.1)), "none of the param"),
        (
            lambda m: gradfree.EngineOptimizer(torch.optim.SGD(m.parameters(), 0.1), None, "backprop"),
            "must be an nn.Module, not",
        ),
        (lambda m: wrapped(m, watch=100), "watch must be a gradfree.GradientWatch(every=100), not 100"),
        (lambda m: wrapped(m, "sgd"), "no engine is called"),
        (lambda m: wrapped(m, HIGHWAY, gamma=0.2), "has its options already; gamma would be ignored"),
        (lambda m: wrapped(m, HIGHWAY, chains=["x"]), "the model has no module 'x'"),
    ],
)
def test_wrong_arguments_raise_and_change_nothing(call, message):
    model = plain_model()
    before = snapshot(model)
    with pytest.raises((TypeError, ValueError, ChainError)) as error:
        call(model)
    assert message in str(error.value)
    assert_unchanged(model, before)


def test_a_watch_is_for_one_optimizer():
    watch, first, second = gradfree.GradientWatch(), plain_model(), plain_model()
    optimizer, before = wrapped(first, HIGHWAY, watch=watch), snapshot(second)
    with pytest.raises(ValueError, match="checks another engine already"):
        wrapped(second, HIGHWAY, watch=watch)
    assert_unchanged(second, before)
    optimizer.detach()
    wrapped(second, HIGHWAY, watch=watch).detach()


def test_loading_a_state_that_does_not_match_changes_nothing():
    model, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
    optimizer = wrapped(model, "dsf", feedback="gate")

    def step():
        model(x)[0].sum().backward()
        optimizer.step()

    step()
    before = copy.deepcopy(optimizer.state_dict())
    step()
    now = copy.deepcopy(optimizer.state_dict())
    for wrong, message in (
        (before | {"gradfree": {"nowhere": {}}}, "no chains"),
        (before | {"param_groups": []}, "parameter group"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(wrong)
        assert str(optimizer.state_dict()) == str(now) != str(before)
