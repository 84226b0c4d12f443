"""Segments in depth: exact inside, the residual path carries across borders, exact after C - 1 iterations."""

import pytest
import torch
from pairwise import pairwise
from torch import nn

import gradfree
from gradfree.errors import ChainError
from gradfree.testing.cases.models import BLOCKS, Model, Plain, assert_equal_gradients, gradients

LENGTH = 7


class Other(Plain):
    def forward(self, x):
        return x + torch.sigmoid(self.linear(x))


def attach(model, name="highway_bp", **options):
    return gradfree.create_engine(name, **options).attach(model, ["blocks"])


@pairwise(
    name=["highway_bp", "fixed_point"],
    kind=[*BLOCKS, "mixed"],
    segments=range(1, LENGTH + 1),
    taps=[(LENGTH - 1,), tuple(range(LENGTH)), (0, 3), (2,)],
)
def test_exact_after_one_iteration_less_than_segments(name, kind, segments, taps):
    """Also if C does not divide the number of blocks, and if the loss reaches only some blocks."""
    if segments > taps[-1] + 1:
        pytest.skip("more segments than links that the loss reaches")
    make, shape = BLOCKS.get(kind, (Plain, (4, 6)))
    blocks = [make() for _ in range(LENGTH)] if kind in BLOCKS else [(Plain, Other)[i % 2]() for i in range(LENGTH)]
    model, x = Model(blocks, shape[-1]).eval(), torch.randn(shape)
    expected = gradients(model, lambda: model(x, taps=taps))
    with attach(model, name, segments=segments, iterations=segments - 1):
        for _ in range(2):
            assert_equal_gradients(gradients(model, lambda: model(x, taps=taps)), expected)


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("name", ["highway_bp", "fixed_point"])
def test_as_many_segments_as_links_equal_the_engine_without_segments(name, k):
    model, x = Model([Plain() for _ in range(LENGTH)], 6), torch.randn(4, 6)
    with attach(model, name, iterations=k):
        expected = gradients(model, lambda: model(x, taps=(2, LENGTH - 1)))
    with attach(model, name, iterations=k, segments=LENGTH):
        assert_equal_gradients(gradients(model, lambda: model(x, taps=(2, LENGTH - 1))), expected)


def test_tolerance_and_figures_measure_the_borders():
    model, x = Model([Plain() for _ in range(12)], 6), torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with attach(model, segments=4, tolerance=1e-13), gradfree.engine_figures() as figures:
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)
    assert figures["blocks"]["sweeps"] <= 3


def test_wrong_segments_are_refused():
    model, x = Model([Plain() for _ in range(3)], 6), torch.randn(4, 6)
    with attach(model, segments=4), pytest.raises(ChainError, match="segments=4, but the loss has reached 3 links"):
        model(x).sum().backward()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args: (2 * args[0],))
    with attach(model, segments=2) as handle, pytest.raises(ChainError, match=r"1 link .*'blocks'\].splits says"):
        model(x).sum().backward()
    assert handle.chains["blocks"].splits
    with pytest.raises(ChainError, match="segments are for chains in depth"):
        gradfree.create_engine("highway_bp", segments=2).attach(nn.GRU(3, 3), [""])
