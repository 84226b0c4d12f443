"""Taps are refused over what does not tell messages apart."""

import pytest
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradfree
from gradfree.errors import ChainError


@pytest.fixture
def group():
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    distributed.destroy_process_group()


def test_taps_need_tags(group):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(4)))
    before = model.state_dict().keys()
    with pytest.raises(ChainError, match=r"taps go over gloo alone, .* on cpu this group has fake. Do without"):
        gradfree.layer_parallel(model, iterations=1, chains=[list("0123")], taps=["1"])
    assert model.state_dict().keys() == before
