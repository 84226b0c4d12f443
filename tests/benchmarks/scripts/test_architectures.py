"""Models of other people's libraries, one of each kind: exact at k = L, with the outputs that they have without us."""

import sys
from importlib.util import find_spec

import pytest
from models_page import LIBRARIES, row

pytest.importorskip("transformers")
QUICK = {a.name: a for a in LIBRARIES["transformers"]() if a.quick}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_gradients_of_an_architecture_are_exact(name):
    """``row`` raises where they are wrong, and tells where they are refused."""
    cosine, refusal = row(QUICK[name])
    assert cosine is not None, refusal


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_gradients_of_an_architecture_for_images_are_exact(library):
    """timm is tried without torchvision, too, which it asks for and of which its models use nothing."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    for architecture in LIBRARIES[library]():
        if architecture.quick:
            cosine, refusal = row(architecture)
            assert cosine is not None, refusal
    assert "torchvision" not in sys.modules or sys.modules["torchvision"].__spec__ is not None
