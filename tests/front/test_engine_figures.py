"""of a solved chain: true, only when asked, and without changing a bit."""

import pytest
import torch
from test_fidelity import Sequences
from torch import nn

import gradfree
from gradfree.orthogonal.weights import drift
from gradfree.testing.cases.models import layered_model, plain_model

SWEEPING = {"highway_bp": "iterations", "fixed_point": "iterations", "dsf": "iterations", "truncated": "window"}


def figures_of(engine, model, x, chains=None):
    with engine.attach(model, chains), gradfree.engine_figures() as figures:
        model(x).pow(2).sum().backward()
    return figures


@pytest.mark.parametrize("name", SWEEPING)
@pytest.mark.parametrize("kind", ["blocks", "time"])
def test_the_residual_is_zero_after_the_last_sweep(name, kind):
    """L - 1 sweeps solve a chain of L links; more are not run."""
    model, x, path, links = (
        (plain_model(5), torch.randn(4, 6), "blocks", 5)
        if kind == "blocks"
        else (Sequences(), torch.randn(4, 6), "rnn.l0", 6)
    )
    model.eval()
    found = []
    for sweeps in (0, 1, links - 1, links + 5):
        engine = gradfree.create_engine(name, **{SWEEPING[name]: sweeps + (name == "truncated")})
        figures = figures_of(engine, model, x)
        assert list(figures) == [path]
        assert figures[path]["sweeps"] == min(sweeps, links - 1)
        found.append(figures[path]["residual"].item())
    assert found[0] > found[1] > 1e-4
    assert found[2] == found[3] < 1e-12


def test_the_residual_is_the_relative_change_of_all_cotangents():
    """Two scalar links, K = 0: δ = (e_1, e_2), one sweep makes δ_1 = e_1 + w_2 e_2."""
    model, x = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), torch.ones(1, 1)
    nn.init.constant_(model[1].weight, 0.5)
    with gradfree.create_engine("fixed_point", iterations=0).attach(model, [""]):
        first = model[0](x)
        loss = 3.0 * first.sum() + 4.0 * model[1](first).sum()
        with gradfree.engine_figures() as figures:
            loss.backward()
    assert figures[""]["residual"].item() == pytest.approx(2.0 / 5.0)


@pytest.mark.parametrize("name", ["foton", "orthogonal_backprop"])
def test_engines_that_keep_weights_orthogonal_report_the_drift(name):
    model = layered_model()
    figures = figures_of(gradfree.create_engine(name), model, torch.randn(4, 6))
    weights = [layer.weight for layer in model.blocks if isinstance(layer, nn.Linear)]
    assert list(figures) == ["blocks"]
    assert torch.equal(figures["blocks"]["drift"], drift(weights).max())
