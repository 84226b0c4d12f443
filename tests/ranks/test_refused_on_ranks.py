"""Models on ranks that are refused, before a message is sent and when they run."""

import copy
import re
from pathlib import Path

import pytest
import torch
from rank_processes import results_of_ranks
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree import errors
from gradfree.errors import ChainError

SCRIPT = Path(__file__).with_name("refused_ranks.py")


def test_checkpoints_transforms_and_copies_of_the_whole_model_are_refused(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, x = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))), torch.randn(4, 2)
        gradfree.layer_parallel(model, "backprop", chains=[list("012")])
        with pytest.raises(ChainError, match="Put checkpoints inside of the model"):
            checkpoint(model, x, use_reentrant=False)
        with pytest.raises(ChainError, match="the model runs inside a transform"):
            torch.func.grad(lambda x: model(x).sum())(x)
        with pytest.raises(ChainError, match="Copy it first, then call layer_parallel"):
            copy.deepcopy(model)
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        distributed.destroy_process_group()


@pytest.mark.processes
@pytest.mark.slow
def test_each_refusal_is_raised_on_one_rank_and_stops_the_other(tmp_path):
    found = results_of_ranks(tmp_path, SCRIPT)
    rows = {name: getattr(errors, name.partition(",")[0]) for name in found[0]}
    assert set(rows.values()) == set(errors.REFUSALS["Blocks on ranks"])
    for name, row in rows.items():
        said = [of_rank[name] for of_rank in found]
        words = re.sub(r"\\\{\w+\\\}", ".+", re.escape(f"{row.why} {row.remedy}"))
        assert any(re.match(words, text) for text in said), (name, said)
        assert all(said), name
