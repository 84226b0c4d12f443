"""Sweeps to a tolerance instead of a fixed number."""

import pytest
import torch
from test_fidelity import Sequences

import gradfree
from gradfree.testing.cases.models import assert_equal_gradients, gradients, plain_model

NAMES = ["highway_bp", "fixed_point"]
KINDS = {
    "blocks": (lambda: plain_model(9), lambda: torch.randn(4, 6), "blocks"),
    "time": (Sequences, lambda: torch.randn(4, 6), "rnn.l0"),
}


def solved(model, x, path, name, scale=1.0, **options):
    """Return the gradients of ``scale`` times the loss, divided by it, and the figures."""
    model.zero_grad()
    with gradfree.create_engine(name, **options).attach(model), gradfree.engine_figures() as figures:
        (scale * model(x).pow(2).sum()).backward()
    return {n: None if p.grad is None else p.grad / scale for n, p in model.named_parameters()}, figures[path]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_it_stops_after_the_first_sweep_below_the_tolerance(name, kind):
    """The residual after k sweeps is the change of sweep k + 1, known from runs with a fixed number."""
    make, batch, path = KINDS[kind]
    model, x = make().eval(), batch()
    links = 9 if kind == "blocks" else 6
    counted = [solved(model, x, path, name, iterations=k) for k in range(links)]
    changes = [figures["residual"].item() for _, figures in counted]
    found = set()
    for tolerance in (0.5, 0.05, 1e-3, 1e-14):
        expected = next((k + 1 for k in range(links - 1) if changes[k] <= tolerance), links - 1)
        actual, figures = solved(model, x, path, name, tolerance=tolerance)
        assert figures["sweeps"] == expected
        assert figures["residual"].item() == changes[expected - 1]
        assert_equal_gradients(actual, counted[expected][0], tolerance=0.0)
        found.add(expected)
    assert len(found) > 1
    assert links - 1 in found
    assert_equal_gradients(solved(model, x, path, name, tolerance=1e-14)[0], gradients(model, lambda: model(x)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_non_finite_change_ends_the_sweeps(name, kind):
    """NaN and inf cotangents propagate as in backpropagation; zeros need no sweep."""
    make, batch, path = KINDS[kind]
    model, x = make(), batch()
    for scale, found in ((float("nan"), torch.isnan), (float("inf"), torch.isnan), (0.0, lambda g: g == 0.0)):
        with gradfree.create_engine(name, tolerance=1e-9).attach(model), gradfree.engine_figures() as figures:
            (scale * model(x).pow(2).sum()).backward()
        assert figures[path]["sweeps"] == 1
        assert any(found(p.grad).any() for p in model.get_submodule(path.split(".")[0]).parameters())
        model.zero_grad()
