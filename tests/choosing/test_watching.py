"""GradientWatch: its cosines are right, and it reacts only if the cosine is too low."""

import io

import pytest
import torch
from torch import nn

import gradfree
from gradfree import ChainError
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
    """It equals that of ``gradient_fidelity`` in the checked steps, where the optimizer gets the exact gradient."""
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


def test_checked_steps_are_exact_and_all_others_are_the_engines():
    model, alone, exact = plain_model(), plain_model(), plain_model()
    optimizer = wrapped(model, watch=gradfree.GradientWatch(every=5, least_cosine=-0.99), iterations=0)
    plain = torch.optim.SGD(exact.parameters(), 1e-3)
    assert all(map(torch.allclose, train(model, optimizer, 1), train(exact, plain, 1)))
    alone.load_state_dict(model.state_dict())
    assert all(map(torch.equal, train(model, optimizer, 4, 1), train(alone, wrapped(alone, iterations=0), 4, 1)))


def test_a_low_cosine_raises_k_and_then_training_is_exact(logged):
    """k = 0, 1, 2, ..., then doubled; each change is logged, and checks end with exact gradients."""
    model, watch = plain_model(), gradfree.GradientWatch(every=50, least_cosine=0.999999, rises=2)
    optimizer = wrapped(model, watch=watch, iterations=0)
    train(model, optimizer, 60)
    engines = [message.partition(" Training continues with ")[2].partition(", tolerance")[0] for message in logged]
    assert engines == ["HighwayBP(iterations=1", "HighwayBP(iterations=2", "exact gradients."]
    assert logged[0].startswith("step 0: the gradient's cosine with the exact one is 0.")
    assert watch.exact
    assert list(watch.cosines) == [0, 1, 2]
    exact = plain_model()
    exact.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(exact.parameters(), 1e-3)
    assert all(map(torch.allclose, train(model, optimizer, 3), train(exact, plain, 3)))


def test_each_chain_keeps_the_feedback_that_its_cell_allows(logged):
    """DSF takes the gate of a GRU, and the paper's ramp for a layer without a gate."""
    model = torch.nn.ModuleList([torch.nn.RNN(3, 4), torch.nn.GRU(4, 4)])
    watch = gradfree.GradientWatch(every=1, least_cosine=0.999999, rises=1)
    optimizer = wrapped(model, "dsf", watch)
    model[1](model[0](torch.randn(12, 2, 3))[0])[0].square().sum().backward()
    optimizer.step()
    found = {path: chain.engine for path, chain in optimizer.handle.attachments.items()}
    assert found == {
        "0": gradfree.create_engine("dsf", feedback="linspace", iterations=1),
        "1": gradfree.create_engine("dsf", feedback="gate", iterations=1),
    }
    assert logged[0].endswith(f"Training continues with {found['0']!r} and {found['1']!r}.")


@pytest.mark.parametrize(
    ("engine", "options", "better"),
    [
        ("truncated", {"window": 1}, {"window": 2}),
        ("dsf", {"feedback": 0.5}, {"feedback": 0.5, "iterations": 1}),
        ("highway_bp", {"iterations": 2}, {"iterations": 4}),
        ("fixed_point", {"tolerance": 1e-2}, {"tolerance": 1e-3}),
    ],
)
def test_sharper_returns_the_next_better_options(engine, options, better):
    assert gradfree.create_engine(engine, **options).sharper == gradfree.create_engine(engine, **better)


def test_a_resumed_watch_continues_with_its_state():
    """Weights, options and checks are bitwise the same; the state loads like weights, and in a plain optimizer."""
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


@pytest.mark.parametrize("rises", [0, 1])
def test_a_watch_in_use_does_not_go_back(rises):
    """The engine's options have risen above those of the state, or gradients are exact: nothing is loaded."""
    model = plain_model()
    watch = gradfree.GradientWatch(every=1, least_cosine=0.999999, rises=rises)
    optimizer = wrapped(model, watch=watch, iterations=0)
    first = optimizer.state_dict()
    train(model, optimizer, 1)
    assert (watch.risen, watch.exact) == (rises, not rises)
    optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(ValueError, match="an earlier step, before the engine got closer gradients"):
        optimizer.load_state_dict(first)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert len(watch.cosines) == 1
    optimizer.load_state_dict(optimizer.state_dict())


def test_an_exact_gradient_or_a_nan_cosine_changes_nothing(logged):
    model, watch = plain_model(), gradfree.GradientWatch(every=10)
    optimizer = wrapped(model, watch=watch, iterations=9)
    train(model, optimizer, 21)
    assert watch.cosines == pytest.approx(dict.fromkeys([0, 10, 20], 1.0))
    assert not logged
    watch = gradfree.GradientWatch(every=1)
    watch.start(optimizer.handle)
    optimizer.gradient_watch = watch
    optimizer.zero_grad()
    (model(torch.full((8, 6), float("nan")))).sum().backward()
    optimizer.step()
    assert watch.cosines[0] != watch.cosines[0]
    assert not watch.exact


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 1.5}, TypeError, "GradientWatch: every must be an int"),
        ({"rises": -1}, ValueError, "GradientWatch: rises must be at least 0"),
        ({"least_cosine": 1.0}, ValueError, "least_cosine must be between -1 and 1"),
    ],
)
def test_wrong_options_raise_and_are_named(options, error, message):
    with pytest.raises(error, match=message):
        gradfree.GradientWatch(**options)


class Readout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(6, 6), nn.Linear(6, 2)


@pytest.mark.parametrize(("engine", "options"), [("fa", {}), ("eprop", {"feedback": "random"})])
def test_layers_with_feedback_weights_cannot_be_watched_and_are_left_alone(engine, options):
    model = Readout()
    with pytest.raises(ChainError, match=r"has \d layers? with feedback weights.*are no chain. Leave it out"):
        wrapped(model, engine, gradfree.GradientWatch(), **options)
    assert not any("forward" in vars(module) for module in model.modules())
