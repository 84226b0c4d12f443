"""Errors for engines of other packages that break the interface."""

from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn

import gradfree
from gradfree import SweepEngine
from gradfree.testing.cases.models import plain_model


@dataclass(frozen=True, kw_only=True)
class Own(SweepEngine):
    count: object = 1
    factor: object = 0.0

    @property
    def sweeps(self):
        return self.count

    def split(self, chain):
        if self.factor == "too few":
            return chain.constant(0.0)[1:]
        return self.factor if self.factor in (None, 0.5) else chain.constant(self.factor)


@pytest.mark.parametrize("wrong", [lambda chain, direct: None, lambda chain, direct: direct])
def test_a_wrong_return_value_of_an_engine_raises_and_names_the_right_one(wrong):
    class Careless(gradfree.Engine):
        gradients = staticmethod(wrong)

    model, message = plain_model(), r"Careless.gradients must return what chain.gradients"
    with Careless().attach(model), pytest.raises(TypeError, match=message):
        model(torch.randn(4, 6)).sum().backward()


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"factor": None}, TypeError, "split must return .*None"),
        ({"factor": "too few"}, TypeError, "split must return .*links"),
        ({"factor": 0.5}, TypeError, "split must return .*float"),
        ({"count": 1.5}, TypeError, "sweeps"),
        ({"count": True}, TypeError, "sweeps"),
        ({"count": -1}, ValueError, "sweeps"),
    ],
)
def test_a_wrong_split_or_number_of_sweeps_raises_and_names_the_engine(options, error, what):
    model = plain_model()
    with Own(**options).attach(model), pytest.raises(error, match=f"Own.*{what}"):
        model(torch.randn(3, 6)).sum().backward()
    assert all(p.grad is None for p in model.blocks.parameters())


def test_numpy_numbers_are_accepted_as_options():
    engine = gradfree.create_engine("highway_bp", iterations=numpy.int64(2), gamma=numpy.float32(0.5))
    assert engine == gradfree.create_engine("highway_bp", iterations=2, gamma=0.5)
    assert repr(engine) == repr(gradfree.create_engine("highway_bp", iterations=2, gamma=0.5))
    with pytest.raises(TypeError, match="iterations"):
        gradfree.create_engine("highway_bp", iterations=numpy.float64(2.0))


@pytest.mark.parametrize("name", ["fixed_point", "dsf"])
def test_an_engine_that_fails_on_the_second_chain_is_on_none(name):
    class Failing(type(gradfree.create_engine(name))):
        def install(self, site, attachment):
            if site.path == "1":
                raise RuntimeError("no more")
            return super().install(site, attachment)

    model, x = nn.Sequential(nn.GRU(3, 3), nn.GRU(3, 3)), torch.randn(5, 2, 3)
    before = [dict(vars(layer)) for layer in model]
    with pytest.raises(RuntimeError, match="no more"):
        Failing().attach(model)
    assert [dict(vars(layer)) for layer in model] == before
    with gradfree.create_engine("backprop").attach(model):
        model[0](x)[0].sum().backward()
