"""Two gloo ranks stay in step to the last bit, and train as one process does on their joined batches."""

import os
import socket
import subprocess
import sys

import pytest
import torch

import gradfree

two_ranks = pytest.importorskip("two_ranks")
resumed_ranks = pytest.importorskip("resumed_ranks")
pytestmark = pytest.mark.slow

RUNS = [
    (engine, kind, run)
    for engine in gradfree.list_engines()
    for kind in two_ranks.kinds(engine)
    for run in ("lightning_run", "fabric_run")
]


def results_of_ranks(folder, count, script=two_ranks.__file__):
    """Return what each of ``count`` ranks of ``script`` has written."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "NODE_RANK": "0"}
    command = [sys.executable, script, str(folder)]
    environments = [os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    started = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for env in environments]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results_of_ranks(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return results_of_ranks(tmp_path_factory.mktemp("one"), 1)[0]


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_ranks_stay_equal_to_the_last_bit(ranks, run):
    assert torch.equal(ranks[0][run], ranks[1][run])


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_two_ranks_train_as_one_process_does(ranks, alone, run):
    torch.testing.assert_close(ranks[0][run], alone[run], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", gradfree.list_engines())
def test_lightning_and_fabric_train_alike(alone, engine):
    for kind in two_ranks.kinds(engine):
        torch.testing.assert_close(
            alone[engine, kind, "lightning_run"], alone[engine, kind, "fabric_run"], rtol=1e-5, atol=1e-5
        )


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    return results_of_ranks(tmp_path_factory.mktemp("resumed"), 2, resumed_ranks.__file__)


def means_of(states):
    return [state["net.middle"]["mean of 0.0.0"] for state in states]


@pytest.mark.parametrize("framework", ["in_lightning", "in_fabric"])
def test_a_running_mean_is_the_same_on_all_ranks_and_resumed_to_the_last_bit(resumed, framework):
    """Each rank's batches move its own mean; behind each step it is that of all, so one rank's checkpoint is enough."""
    (whole, states), _ = resumed[0][framework]
    assert len(states) == resumed_ranks.STEPS
    means = means_of(states)
    assert not any(map(torch.equal, means, means[1:]))
    for rank in resumed:
        (weights, after), (resumed_weights, resumed_after) = rank[framework]
        assert torch.equal(weights, whole)
        assert torch.equal(resumed_weights, whole)
        assert all(map(torch.equal, means_of(after), means))
        assert len(resumed_after) == resumed_ranks.STEPS - resumed_ranks.STOP
        assert all(map(torch.equal, means_of(resumed_after), means[resumed_ranks.STOP :]))
