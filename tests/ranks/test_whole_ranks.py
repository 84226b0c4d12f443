"""Checkpoints and clipping are those of the whole model."""

from pathlib import Path

import pytest
import torch
from rank_processes import results_of_ranks


@pytest.mark.processes
@pytest.mark.slow
def test_three_ranks_save_and_two_resume(tmp_path):
    """Weights and optimizer states of three ranks are those of one process, and two ranks resume from them.

    All ranks keep drawing the same random numbers, such as those that shuffle the data.
    """
    found = results_of_ranks(tmp_path, Path(__file__).with_name("whole_ranks.py"), ranks=3)
    for rank in found:
        assert rank["norms of ranks"] == pytest.approx(rank["norms"], rel=1e-10)
        assert min(rank["norms"]) > 0.1
        assert "has 2 blocks, too few for 3 ranks" in rank["too few"]
        assert "differ in residual" in rank["one rank's option"]
        # Each rank has drawn another number of masks: two of the four blocks are on one of them.
        assert rank["goes on as before"]
        assert rank["draws anew in each pass"]
    for rank in found[:2]:
        assert "only the state has 'extra'" in rank["other keys"]
    assert found[0]["checkpoint"] < 1e-10
    assert found[0]["resumed"] < 1e-10


@pytest.mark.processes
@pytest.mark.slow
def test_a_second_mesh_dimension_splits_the_data(tmp_path):
    """DDP or FSDP2 around each rank's part: replicas are bitwise equal, and train as one process does."""
    found = results_of_ranks(tmp_path, Path(__file__).with_name("mesh_ranks.py"), ranks=4)
    pairs = [(found[rank][way], found[rank + 2][way]) for rank in (0, 1) for way in found[0]]
    for (weights, *_), (others, *_) in pairs:
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert len(found[0]) == 2
    for _, count, off in found[0].values():
        assert count > 10
        assert off < 1e-10
