"""Architectures of other libraries, one of each kind, have exact gradients with enough iterations."""

import sys
from importlib.util import find_spec

import pytest
from models_page import LIBRARIES, row

pytest.importorskip("transformers")
QUICK = {a.name: a for a in LIBRARIES["transformers"]() if a.quick}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_gradients_of_an_architecture_are_exact(name):
    """``row`` raises if they are wrong, and returns the message if they are refused."""
    cosine, refusal = row(QUICK[name])
    assert cosine is not None, refusal


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_gradients_of_an_architecture_for_images_are_exact(library):
    """timm also works without torchvision, which it imports without need."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    for architecture in LIBRARIES[library]():
        if architecture.quick:
            cosine, refusal = row(architecture)
            assert cosine is not None, refusal
    assert "torchvision" not in sys.modules or sys.modules["torchvision"].__spec__ is not None
