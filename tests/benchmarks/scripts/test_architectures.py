"""Models of other people's libraries, one of each kind: exact at k = L, with the outputs that they have without us."""

import sys
from importlib.util import find_spec

import lifted_costs
import pytest
import torch
from models_page import LIBRARIES, row

from gradfree.testing.cases.models import assert_equal_gradients

pytest.importorskip("transformers")
QUICK = {a.name: a for a in LIBRARIES["transformers"]() if a.quick}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_gradients_of_an_architecture_are_exact(name):
    """``row`` raises where they are wrong, and tells where they are refused."""
    exact, line = row(QUICK[name])
    assert exact, line


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_gradients_of_an_architecture_for_images_are_exact(library):
    """timm is tried without torchvision, too, which it asks for and of which its models use nothing."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    for architecture in LIBRARIES[library]():
        if architecture.quick:
            exact, line = row(architecture)
            assert exact, line
    assert "torchvision" not in sys.modules or sys.modules["torchvision"].__spec__ is not None


def test_blocks_whose_costs_are_told_have_exact_gradients(monkeypatch):
    for name, size in ("WIDTH", 8), ("LENGTH", 4):
        monkeypatch.setattr(lifted_costs, name, size)
    monkeypatch.setitem(lifted_costs.ENGINES, "k = L", {"name": "highway_bp", "iterations": 4})
    x = torch.randn(3, 8)
    for kind in lifted_costs.KINDS:
        model, found = lifted_costs.DemandingNetwork(kind), []
        for engine in "autograd", "link by link", "k = L":
            with lifted_costs.engine_on(model, engine):
                lifted_costs.step(model, x, engine)
            found.append({name: p.grad for name, p in model.named_parameters()})
        for gradients in found[1:]:
            assert_equal_gradients(gradients, found[0])
