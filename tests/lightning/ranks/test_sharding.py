"""FSDP2 around a chain trains as one process does, with every engine; inside a chain it is refused."""

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp")
import sharded_ranks
from rank_processes import results_of_ranks

pytestmark = [pytest.mark.slow, pytest.mark.processes]

RUNS = [(engine, kind, run.__name__) for (engine, kind), runs in sharded_ranks.RUNS.items() for run in runs]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results_of_ranks(tmp_path_factory.mktemp("sharded"), sharded_ranks.__file__)


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_two_ranks_train_a_sharded_model_as_one_process_does(ranks, run):
    *net, name = run
    for rank in ranks:
        runs = rank["runs"][tuple(net)]
        torch.testing.assert_close(runs[name], runs["one_process"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("what", "path"),
    [
        ("a block", "net.middle.1"),
        ("a part of a block", "net.middle.2.branch"),
        ("a cell", "middle.cell"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_modules_sharded_inside_a_chain_are_refused(ranks, what, path, when):
    """Their gradients would silently be zero."""
    for rank in ranks:
        message = rank["refusals"][what, when]
        assert f"{path} is sharded by FSDP and lies inside a chain" in message
        assert "Shard the chain as a whole, or the model: fully_shard(model)" in message


def test_gradients_are_compared_only_while_parameters_are_whole(ranks):
    assert "net.stem.weight is sharded by FSDP and not gathered now" in ranks[0]["comparison"]
