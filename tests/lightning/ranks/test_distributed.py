"""The engine's state on two gloo ranks that train by DDP."""

import pytest
import torch
from rank_processes import results_of_ranks

resumed_ranks = pytest.importorskip("resumed_ranks")
pytestmark = [pytest.mark.slow, pytest.mark.processes]


def means_of(states):
    return [state["net.middle"]["means: net.middle.l0.0"] for state in states]


def test_a_running_mean_is_equal_on_all_ranks_and_resumed_bitwise(tmp_path):
    """Each rank's batches move its own mean; after each step means are averaged, so one rank's checkpoint suffices."""
    resumed = results_of_ranks(tmp_path, resumed_ranks.__file__)
    (whole, states), _ = resumed[0]
    assert len(states) == resumed_ranks.STEPS
    means = means_of(states)
    assert not any(map(torch.equal, means, means[1:]))
    for rank in resumed:
        (weights, after), (resumed_weights, resumed_after) = rank
        assert torch.equal(weights, whole)
        assert torch.equal(resumed_weights, whole)
        assert all(map(torch.equal, means_of(after), means))
        assert len(resumed_after) == resumed_ranks.STEPS - resumed_ranks.STOP
        assert all(map(torch.equal, means_of(resumed_after), means[resumed_ranks.STOP :]))
