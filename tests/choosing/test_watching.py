"""A gradient that is watched: what it sees is so, and it acts where the bias matters, and nowhere else."""

import io
import logging

import pytest
import torch

import gradfree
from gradfree.choosing.watching import falling_to
from gradfree.fidelity import loss_fidelity
from gradfree.testing.cases import models


def plain_model():
    torch.manual_seed(0)
    return models.plain_model()


def wrapped(model, engine="highway_bp", watch=None, **options):
    return gradfree.EngineOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model, engine, watch=watch, **options)


def train(model, optimizer, steps, first=0):
    for n in range(first, first + steps):
        torch.manual_seed(n)
        optimizer.zero_grad()
        model(torch.randn(8, 6)).pow(2).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_the_cosine_is_that_of_the_chains_gradients():
    """As fidelity tells it in the very steps that are looked at, where the optimizer gets the exact gradient."""
    model, watch = plain_model(), gradfree.GradientWatch(every=2, least_cosine=-0.99)
    optimizer = wrapped(model, watch=watch, iterations=0)
    expected = []
    for n in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6)).pow(2).sum()
        if n % 2 == 0:
            expected.append(loss_fidelity(loss, model, optimizer.handle).chains.cosine)
        loss.backward()
        optimizer.step()
    assert watch.cosines == pytest.approx(dict(zip([0, 2], expected, strict=True)), abs=1e-12)
    assert expected[0] < 0.99


def test_a_step_that_is_looked_at_is_exact_and_the_others_are_the_engines():
    model, alone, exact = plain_model(), plain_model(), plain_model()
    optimizer = wrapped(model, watch=gradfree.GradientWatch(every=5, least_cosine=-0.99), iterations=0)
    plain = torch.optim.SGD(exact.parameters(), 1e-3)
    assert all(map(torch.allclose, train(model, optimizer, 1), train(exact, plain, 1)))
    alone.load_state_dict(model.state_dict())
    assert all(map(torch.equal, train(model, optimizer, 4, 1), train(alone, wrapped(alone, iterations=0), 4, 1)))


def test_a_low_cosine_raises_k_and_then_training_is_exact(caplog):
    """0, 1, 2, ...: twice as many each time; what it does is said, and it looks no more."""
    model, watch = plain_model(), gradfree.GradientWatch(every=50, least_cosine=0.999999, rises=2)
    optimizer = wrapped(model, watch=watch, iterations=0)
    with caplog.at_level(logging.WARNING, "gradfree"):
        train(model, optimizer, 60)
    told = [message.partition(" Training goes on with ")[2].partition(", tolerance")[0] for message in caplog.messages]
    assert told == ["HighwayBP(iterations=1", "HighwayBP(iterations=2", "exact gradients."]
    assert caplog.messages[0].startswith("step 0: the gradient's cosine with the exact one is 0.")
    assert watch.exact
    assert list(watch.cosines) == [0, 1, 2]
    exact = plain_model()
    exact.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(exact.parameters(), 1e-3)
    assert all(map(torch.allclose, train(model, optimizer, 3), train(exact, plain, 3)))


def test_a_gradient_that_is_right_is_left_alone(caplog):
    model, watch = plain_model(), gradfree.GradientWatch(every=10)
    optimizer = wrapped(model, watch=watch, iterations=9)
    train(model, optimizer, 41)
    assert list(watch.cosines) == [0, 10, 20, 30, 40]
    assert min(watch.cosines.values()) == pytest.approx(1.0)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("engine", "options", "better"),
    [
        ("truncated", {"window": 1}, {"window": 2}),
        ("dsf", {"feedback": 0.5}, {"feedback": 0.5, "iterations": 1}),
        ("fixed_point", {"tolerance": 1e-2}, {"tolerance": 1e-3}),
    ],
)
def test_engines_know_their_next_better_options(engine, options, better):
    assert gradfree.create_engine(engine, **options).sharper == gradfree.create_engine(engine, **better)


def test_what_has_no_better_options_becomes_exact():
    assert gradfree.create_engine("backprop").sharper is None


def test_a_drift_is_noticed_before_the_bound_is_reached(monkeypatch, caplog):
    """Eight looks that fall beyond doubt, towards the bound; not eight that go up and down, nor a slow fall."""
    falling = [0.99 - 0.008 * n for n in range(8)]
    assert falling_to(falling) == pytest.approx(0.99 - 0.008 * 15)
    assert falling_to(falling[:7]) == float("inf")
    assert falling_to([0.95, 0.93, 0.96, 0.92, 0.95, 0.94, 0.93, 0.95]) == float("inf")
    assert falling_to([0.99 - 1e-4 * n for n in range(8)]) > 0.98
    looks = iter(falling)
    monkeypatch.setattr("gradfree.choosing.watching._cosine", lambda seen: next(looks, 1.0))
    model, watch = plain_model(), gradfree.GradientWatch(every=1, least_cosine=0.9)
    train(model, wrapped(model, watch=watch, iterations=0), 9)
    (message,) = caplog.messages
    assert message.startswith("step 7: the gradient's cosine with the exact one, 0.934, falls towards 0.9.")


def test_a_resumed_run_goes_on_where_it_was():
    """Weights, options and looks, to the last bit; the state loads as weights do, and in a plain optimizer."""
    model, resumed = plain_model(), plain_model()
    watch, again = (gradfree.GradientWatch(every=4, least_cosine=0.999999, rises=2) for _ in range(2))
    optimizer = wrapped(model, watch=watch, iterations=0)
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed.load_state_dict(weights)
    other = wrapped(resumed, watch=again, iterations=0)
    other.load_state_dict(state)
    assert all(map(torch.equal, train(model, optimizer, 9, 2), train(resumed, other, 9, 2)))
    assert again.state_dict() == watch.state_dict()
    torch.optim.SGD(model.parameters()).load_state_dict(state)


def test_nan_in_the_exact_gradient_tells_nothing_in_the_engines_all():
    model, watch = plain_model(), gradfree.GradientWatch(every=1)
    optimizer = wrapped(model, watch=watch, iterations=9)
    (model(torch.full((8, 6), float("nan")))).sum().backward()
    optimizer.step()
    assert watch.cosines[0] != watch.cosines[0]
    assert not watch.exact


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "GradientWatch: every must be at least 1, not 0"),
        ({"every": 1.5}, TypeError, "GradientWatch: every must be an int"),
        ({"rises": -1}, ValueError, "GradientWatch: rises must be at least 0"),
        ({"least_cosine": 1.0}, ValueError, "least_cosine must be between -1 and 1"),
        ({"least_cosine": "0.9"}, TypeError, "least_cosine must be a number"),
    ],
)
def test_wrong_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        gradfree.GradientWatch(**options)
