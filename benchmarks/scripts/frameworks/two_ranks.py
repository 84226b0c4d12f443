"""Training a case on two processes of this machine with gloo."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import cache
from shutil import rmtree
from tempfile import mkdtemp

import torch
from frameworks.training import Updates, attached_inside, batches, loss_of, optimizer_of, updates_of
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradfree.chains.handle import Handle
from gradfree.engines.engine import Engine
from gradfree.errors import ChainError
from gradfree.ranks.stage import layer_parallel
from gradfree.testing.cases.cases import CASES, ModelCase, Specimen, isolated

RANKS = 2
Run = Callable[[Engine, ModelCase, int], Updates]


def on_two_ranks(run: Run, engine: Engine, case: ModelCase) -> list[Updates]:
    """Return what ``run`` returns on each rank.

    Raises:
        ChainError: a rank raised one; the first rank's is raised.
    """
    futures = [worker.submit(_run, run, engine, case.name, rank) for rank, worker in enumerate(_workers())]
    results = [future.result(timeout=120) for future in futures]
    for result in results:
        if isinstance(result, ChainError):
            raise result
    return results


def ddp_run(engine: Engine, case: ModelCase, rank: int) -> Updates:
    """Train under torch's DistributedDataParallel."""
    specimen = Specimen(case)
    with attached_inside(engine, specimen) as handle:
        _train(specimen, nn.parallel.DistributedDataParallel(specimen.model), rank, handle)
    return updates_of(specimen)


def fsdp_run(engine: Engine, case: ModelCase, rank: int) -> Updates:
    """Train a model that is sharded as a whole by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    specimen = Specimen(case)
    fully_shard(specimen.model, mesh=init_device_mesh("cpu", (RANKS,)))
    with attached_inside(engine, specimen) as handle:
        _train(specimen, specimen.model, rank, handle)
    return updates_of(specimen)


def _train(specimen: Specimen, model: nn.Module, rank: int | None = None, handle: Handle | None = None) -> None:
    """Take all steps; with ``rank``, on this rank's share of each batch."""
    optimizer = optimizer_of(specimen.model)
    for x in batches(specimen):
        optimizer.zero_grad()
        loss_of(model(x if rank is None else x.chunk(RANKS)[rank])).backward()
        optimizer.step()
        if handle is not None:
            handle.average_over_ranks()


def layer_parallel_run(engine: Engine, case: ModelCase, rank: int) -> Updates:
    """Train a model with a part of the blocks on each rank."""
    specimen = Specimen(case)
    layer_parallel(specimen.model, engine, chains=specimen.chains)
    _train(specimen, specimen.model)
    return updates_of(specimen)


def layer_parallel_lightning_run(engine: Engine, case: ModelCase, rank: int) -> Updates:
    """Do the same with Lightning's Trainer."""
    from frameworks.trainer_runs import layer_parallel_fit

    return layer_parallel_fit(engine, case, RANKS)


def layer_parallel_ddp_run(engine: Engine, case: ModelCase, rank: int) -> Updates:
    """Train copies of a layer-parallel model by DDP over another dimension of the mesh."""
    specimen, data = _copy(engine, case)
    _train(specimen, nn.parallel.DistributedDataParallel(specimen.model, process_group=data.get_group()), rank)
    return updates_of(specimen)


def layer_parallel_fsdp_run(engine: Engine, case: ModelCase, rank: int) -> Updates:
    """Do the same by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    specimen, data = _copy(engine, case)
    _train(specimen, fully_shard(specimen.model, mesh=data), rank)
    return updates_of(specimen)


def _copy(engine: Engine, case: ModelCase) -> tuple[Specimen, DeviceMesh]:
    """Return a layer-parallel model on a single rank, and the mesh dimension for the data."""
    specimen = Specimen(case)
    layer_parallel(specimen.model, engine, mesh=_mesh()["blocks"], chains=specimen.chains)
    return specimen, _mesh()["data"]


@cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("data", "blocks"))


def lightning_run(engine: Engine, case: ModelCase, rank: int) -> Updates:
    """Train with Lightning's Trainer; of two accumulated batches, the first one's gradients stay on their rank."""
    from frameworks.trainer_runs import fit

    return fit(engine, case, rank=rank, devices=RANKS, accumulate_grad_batches=2)


@cache
def _workers() -> list[ProcessPoolExecutor]:
    """Return one process for each rank; they are reused, as starting them takes time."""
    folder = mkdtemp()
    atexit.register(rmtree, folder, ignore_errors=True)
    # The fork server has imported torch already; forking is reliable only on Linux.
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    return [ProcessPoolExecutor(1, context, _join, (rank, f"{folder}/store")) for rank in range(RANKS)]


def _join(rank: int, store: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "NODE_RANK": "0"}
    # Lightning requires them, but uses the existing group.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    # The ranks share the cores: waiting threads of one would slow the other down.
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"file://{store}", timeout=timedelta(seconds=60), rank=rank, world_size=RANKS
    )


def _run(run: Run, engine: Engine, name: str, rank: int) -> Updates | ChainError:
    case = next(case for case in CASES if case.name == name)
    try:
        with isolated():
            return run(engine, case, rank)
    except ChainError as error:
        if error.__cause__ is not None:
            raise
        return error
