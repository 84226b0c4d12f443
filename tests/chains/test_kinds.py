"""Kinds of chains that are registered work like those of gradfree."""

import pytest
from torch import nn

import gradfree
from gradfree.chains import kinds
from gradfree.depth.depth_site import Blocks
from gradfree.testing.cases.models import LayeredModel, Plain


class Loop(nn.Module):
    """Has attributes b1, b2, ..."""

    def __init__(self, *blocks):
        super().__init__()
        for n, block in enumerate(blocks, start=1):
            setattr(self, f"b{n}", block)


class Loops(Blocks):
    looks_like = "a module with b1, b2, ..."

    @classmethod
    def accepts(cls, module):
        return isinstance(module, Loop)

    @classmethod
    def blocks_of(cls, module):
        return {name: block for name, block in module.named_children() if name[0] == "b"}


class LoopModel(LayeredModel):
    def __init__(self):
        super().__init__()
        self.blocks = Loop(*(Plain() for _ in range(5)))


ENGINE = gradfree.create_engine("highway_bp")


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Remove registered kinds after each test."""
    monkeypatch.setattr(kinds, "_registered", {})


def test_the_kind_registered_last_takes_a_module():
    """A kind that is registered again is replaced, as when a notebook cell runs again."""

    class Two(Loops):
        @classmethod
        def blocks_of(cls, module):
            return dict(list(super().blocks_of(module).items())[:2])

    gradfree.register_chain("loops")(Loops)
    gradfree.register_chain("two")(Two)
    assert str(ENGINE.validate(LoopModel()).chains["blocks"]) == "2 blocks"
    gradfree.register_chain("loops")(Two)
    assert kinds.known_kinds().count(Loops) == 0
    assert str(ENGINE.validate(LoopModel()).chains["blocks"]) == "2 blocks"


def test_a_class_that_is_not_a_site_cannot_be_registered():
    for wrong in (Loop, Loops("", Loop()), "Loops"):
        with pytest.raises(TypeError, match=r"'wrong' must be a subclass of gradfree.chains.site.Site"):
            gradfree.register_chain("wrong")(wrong)
