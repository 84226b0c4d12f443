"""The learnt temperature: it moves the scale of the outputs against the loss, whatever the scale of the loss."""

import copy
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfree
from gradfree.algorithms import FOTON, OrthogonalBackprop
from gradfree.fidelity import loss_fidelity

ENGINES = {"foton": FOTON(), "streaming": FOTON(streaming=True), "orthogonal_backprop": OrthogonalBackprop()}


def net():
    made = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    gradfree.orthogonalize(made)
    return made


def temperature(handle):
    return temperature_in(handle.state_dict()[""])


def temperature_in(state):
    """Return T: the one before the last step, updated with the sums of that step."""
    asked = state["means: asked of the temperature"]
    return math.exp(state["means: log temperature"] - 0.05 * (asked[0] / asked[1]).nan_to_num(0.0, 0.0, 0.0))


def temperatures(engine, loss, steps, scale=1.0, rate=0.0):
    """Return the temperature after each step; the weights change only if ``rate`` is positive."""
    torch.manual_seed(0)
    model, x = net(), torch.randn(64, 8)
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=rate)
    with engine.attach(model) as handle:
        for _ in range(steps):
            optimizer.zero_grad()
            (scale * loss(model(x), x)).backward()
            optimizer.step()
            found.append(temperature(handle))
    return found


def known(out, x):
    """Return the loss of labels that the outputs predict."""
    return F.cross_entropy(out, (out.detach()).argmax(1))


def noise(out, x):
    return F.cross_entropy(out, (x[:, 0] * 1e4).long() % 3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_it_rises_if_outputs_are_right_and_falls_if_they_are_noise(engine):
    """Its logarithm changes by 0.05 per step at most."""
    right, wrong = temperatures(engine, known, 60), temperatures(engine, noise, 100)
    assert all(1.0 < after / before < math.exp(0.05) for before, after in pairwise(right))
    assert right[-1] > 3
    assert wrong[-1] < 0.7


@pytest.mark.parametrize("scale", [1e-4, 65536.0])
def test_the_scale_of_the_loss_does_not_change_it(scale):
    """Loss scaling, accumulation."""
    assert temperatures(FOTON(), noise, 5, scale) == pytest.approx(temperatures(FOTON(), noise, 5), rel=1e-9)


def test_the_error_does_not_contain_it():
    model, x = net(), torch.randn(5, 8)
    y = torch.randint(3, (5,))
    with OrthogonalBackprop().attach(model) as handle:
        handle.load_state_dict({"": {"means: log temperature": torch.tensor(1.5)}})
        F.cross_entropy(model(x), y).backward()
    factor = math.exp(1.5)
    expected = torch.autograd.grad(F.cross_entropy(factor * model(x), y) / factor, list(model.parameters()))
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_steps_that_overflowed_do_not_move_it():
    model, x = net(), torch.randn(5, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with FOTON().attach(model) as handle:
        for scale in (1.0, math.inf, 1.0):
            known(model(x), x).mul(scale).backward()
            optimizer.zero_grad()  # GradScaler skips such a step; its sums are still there at the next one.
        optimizer.step()
        assert temperature(handle) == 1.0
        known(model(x), x).backward()
        optimizer.step()
        assert temperature(handle) == pytest.approx(1.03, abs=0.02)


def test_it_is_in_checkpoints_and_removed_with_the_engine():
    model, x = net(), torch.randn(5, 8)
    plain, optimizer = model(x), torch.optim.SGD(model.parameters(), lr=0.0)
    with FOTON().attach(model) as handle:
        for _ in range(3):
            known(model(x), x).backward()
            optimizer.step()
        hot, state = model(x), copy.deepcopy(handle.state_dict())
        with gradfree.engine_figures() as figures:
            known(model(x), x).backward()
        assert figures[""]["temperature"].item() == pytest.approx(temperature(handle))
    torch.testing.assert_close(model(x), plain)
    with FOTON().attach(model) as handle:
        handle.load_state_dict(state)
        torch.testing.assert_close(model(x), hot, rtol=0, atol=0)
    torch.testing.assert_close(hot, temperature_in(state[""]) * plain)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_dry_runs_do_not_change_it(engine):
    """Also if a step has two passes, of which one is a dry run."""

    def found(looks):
        torch.manual_seed(0)
        model, x, y = net(), torch.randn(2, 16, 8), torch.arange(16) % 3
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with engine.attach(model) as handle:
            for part in range(2):
                loss = F.cross_entropy(model(x[part]), y)
                if looks and not part:
                    loss_fidelity(loss, model, handle)
                loss.backward()
            optimizer.step()
            return temperature(handle)

    assert found(looks=True) == found(looks=False) != 1.0
