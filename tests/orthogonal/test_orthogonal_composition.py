"""Orthogonal(engine): any engine for layers with orthogonal weights; FOTON is one such pair."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfree
from gradfree.algorithms import DFA, FOTON, PEPITA, Backprop, FixedPoint, FOTONRule, Orthogonal, OrthogonalBackprop
from gradfree.orthogonal.weights import drift
from gradfree.testing.cases.models import assert_equal_gradients, gradients

RULES = [{}, {"streaming": True}, {"perturbation": "tangent"}, {"refresh_feedback_every": 2}]
EXACT = [Backprop(), Backprop(plain=False), Backprop(plain=True), FixedPoint(iterations=9)]
APPROXIMATE = [DFA(), PEPITA(), FOTONRule()]


def net():
    layers = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    gradfree.orthogonalize(layers)
    return layers


def batch():
    return torch.randn(5, 9), torch.randint(4, (5,))


def loss_gradients(layers, loss):
    layers.zero_grad()
    loss().backward()
    return {name: p.grad.clone() for name, p in layers.named_parameters()}


def train(layers, steps):
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    for _ in range(steps):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(layers(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("temperature", [1, 3.7, 16])
@pytest.mark.parametrize("engine", EXACT, ids=str)
def test_with_exact_engines_the_gradients_are_autograds_of_the_loss_over_the_temperature(engine, temperature):
    """e = softmax(T y) - t: the gradient of the cross-entropy of T y, without the factor T."""
    layers, (x, y) = net(), batch()
    expected = loss_gradients(layers, lambda: F.cross_entropy(temperature * layers(x), y) / temperature)
    with Orthogonal(engine, temperature=temperature).attach(layers, [""]):
        actual = loss_gradients(layers, lambda: F.cross_entropy(layers(x), y))
    assert_equal_gradients(actual, expected)


@pytest.mark.parametrize("engine", APPROXIMATE, ids=str)
def test_the_gradients_are_the_inner_engines_of_the_loss_over_the_temperature(engine):
    layers, (x, y) = net(), batch()
    with engine.attach(layers):
        expected = loss_gradients(layers, lambda: F.cross_entropy(3.7 * layers(x), y) / 3.7)
    with Orthogonal(engine, temperature=3.7).attach(layers):
        actual = loss_gradients(layers, lambda: F.cross_entropy(layers(x), y))
    assert_equal_gradients(actual, expected)


@pytest.mark.parametrize("engine", [*EXACT, *APPROXIMATE], ids=str)
def test_weights_stay_orthogonal_under_every_engine(engine):
    layers = net()
    weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    with Orthogonal(engine, orthogonalize_every=1, orthogonalize_steps=3).attach(layers, [""]):
        before = weights[0].clone()
        train(layers, 5)
    assert drift(weights).max() < 1e-6
    assert not torch.allclose(weights[0], before, atol=1e-3)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_foton_is_its_rule_with_orthogonal_weights(rule):
    """Training is bitwise equal, and so is the state for checkpoints."""
    options = {"temperature": 4.0, "orthogonalize_every": 2, "orthogonalize_steps": 2}
    results = []
    for engine in (FOTON(**options, **rule), Orthogonal(FOTONRule(**rule), **options)):
        torch.manual_seed(5)
        layers = net()
        with engine.attach(layers) as handle:
            train(layers, 5)
            kept = handle.state_dict()[""]
        results.append({**layers.state_dict(), **kept})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_the_inner_engines_after_step_runs_once():
    """FOTON drops F at every second step; both engines count a step once."""
    layers = net()
    with Orthogonal(FOTONRule(refresh_feedback_every=2), orthogonalize_every=1).attach(layers) as handle:
        kept = []
        for _ in range(4):
            train(layers, 1)
            kept.append(handle.state_dict()[""])
    assert [int(own["steps"]) for own in kept] == [1, 2, 3, 4]
    assert [any(key.startswith("F to") for key in own) for own in kept] == [True, False, True, False]


def test_problems_of_the_inner_engine_are_reported():
    layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)))
    report = Orthogonal(FOTONRule(streaming=True)).validate(layers)
    assert report.problems == FOTON(streaming=True).validate(layers).problems != []
    assert Orthogonal(FOTONRule()).validate(layers).notes == FOTON().validate(layers).notes != []
    assert Orthogonal(Backprop()).validate(layers).ok
    assert "has no gate" not in str(Orthogonal(DFA()).validate(layers))


@pytest.mark.parametrize("engine", [FOTON(temperature=2), OrthogonalBackprop(), Orthogonal(DFA(seed=1), temperature=2)])
def test_compositions_are_engines_like_any_other(engine):
    assert isinstance(engine, gradfree.Engine)
    for other in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert other == engine
        assert hash(other) == hash(engine)
    with pytest.raises(AttributeError):
        engine.temperature = 3.0
    layers, x = net(), torch.randn(3, 9)
    with engine.attach(layers):
        expected = gradients(layers, lambda: layers(x))
        other = copy.deepcopy(layers)
        assert_equal_gradients(gradients(other, lambda: other(x)), expected, tolerance=0.0)


@pytest.mark.parametrize("inner", [FOTON(), OrthogonalBackprop(), Orthogonal(DFA())], ids=lambda e: type(e).__name__)
def test_orthogonal_engines_are_not_wrapped_again(inner):
    with pytest.raises(TypeError, match="keeps weights orthogonal by itself needs no wrapper"):
        Orthogonal(inner)


def test_engines_that_cannot_be_wrapped_are_refused():
    class OfTime(Backprop):
        kinds = ()

    for wrong in ("dfa", DFA, OfTime()):
        with pytest.raises(TypeError, match="Orthogonal keeps weights orthogonal under an engine for layers, not"):
            Orthogonal(wrong)
    with pytest.raises(TypeError, match=r"Orthogonal takes no option 'heat'; its options are: .*temperature, engine"):
        Orthogonal(DFA(), heat=2)
    with pytest.raises(TypeError, match="only options given by name"):
        Orthogonal(DFA(), 1, 2)
    with pytest.raises(TypeError, match="only options given by name"):
        DFA(1)
