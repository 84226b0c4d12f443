"""Lightning and several ranks; the reference is a plain loop with the same engine on one."""

from __future__ import annotations

from typing import Any

import torch
from frameworks.training import train
from frameworks.two_ranks import (
    ddp_run,
    fsdp_run,
    layer_parallel_ddp_run,
    layer_parallel_fsdp_run,
    layer_parallel_lightning_run,
    layer_parallel_run,
    lightning_run,
    on_two_ranks,
)

from gradfree.engines.engine import Engine
from gradfree.registry import create_engine
from gradfree.testing.cases.cases import RESIDUAL, ModelCase
from gradfree.testing.cases.models import assert_equal_gradients
from gradfree.testing.features.feature import feature


@feature("Lightning, one device", slow=True)
def lightning(engine: Engine, case: ModelCase) -> None:
    """``Trainer(strategy=EngineStrategy(engine))`` trains to the weights of a plain loop."""
    _check_fit(engine, case, {}, {})


@feature("Lightning, clipping and accumulation", slow=True)
def lightning_clipping(engine: Engine, case: ModelCase) -> None:
    """Likewise, with ``gradient_clip_val`` and ``accumulate_grad_batches``."""
    _check_fit(engine, case, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}, {"clip": 0.1, "accumulate": 2})


@feature("Lightning, precision bf16-mixed", slow=True)
def lightning_bf16(engine: Engine, case: ModelCase) -> None:
    """Likewise, as in a loop with autocast, after one step.

    Further steps multiply the rounding: after six of them autograd's own updates in bfloat16 are off by half and more.
    """
    _check_fit(
        engine,
        case,
        {"precision": "bf16-mixed", "dtype": torch.float32, "max_steps": 1},
        {"low": torch.bfloat16, "dtype": torch.float32, "steps": 1},
        tolerance=0.02,
    )


@feature("Lightning, manual optimization", slow=True)
def lightning_manual(engine: Engine, case: ModelCase) -> None:
    """Likewise, with ``manual_backward`` and steps taken by hand."""
    _check_fit(engine, case, {"manual": True}, {})


@feature("Lightning, checkpoint and resume", slow=True)
def lightning_resume(engine: Engine, case: ModelCase) -> None:
    """Two epochs, the second one resumed by another model from a checkpoint, end with the weights of a plain loop."""
    from frameworks.trainer_runs import fit_and_resume

    assert_equal_gradients(fit_and_resume(engine, case), train(engine, case, epochs=2))


@feature("DDP, two ranks", slow=True)
def ddp(engine: Engine, case: ModelCase) -> None:
    """Two ranks stay equal to the last bit, and train to the weights of one with their joined batches.

    But for engines that draw random numbers, other ones on each rank.
    """
    _check_ranks(ddp_run, engine, case)


@feature("FSDP2 at the root, two ranks", slow=True)
def fsdp(engine: Engine, case: ModelCase) -> None:
    """Likewise, with ``fully_shard(model)``."""
    _check_ranks(fsdp_run, engine, case)


@feature("Lightning DDP, two ranks", slow=True)
def lightning_ddp(engine: Engine, case: ModelCase) -> None:
    """Likewise, with ``Trainer(strategy=EngineDDPStrategy(engine), devices=2, accumulate_grad_batches=2)``."""
    _check_ranks(lightning_run, engine, case, accumulate=2)


@feature("layer_parallel, two ranks", families=(RESIDUAL,), slow=True)
def layer_parallel(engine: Engine, case: ModelCase) -> None:
    """``layer_parallel(model, engine)``, a part of the blocks on each rank, trains to the weights of exact gradients.

    Which engines have with as many sweeps as there are borders.
    """
    _check_parts(layer_parallel_run, engine, case)


@feature("Lightning, layer_parallel, two ranks", families=(RESIDUAL,), slow=True)
def lightning_layer_parallel(engine: Engine, case: ModelCase) -> None:
    """Likewise, with ``Trainer(strategy=LayerParallelStrategy(engine), devices=2)``."""
    _check_parts(layer_parallel_lightning_run, engine, case)


@feature("layer_parallel in a mesh with DDP", families=(RESIDUAL,), slow=True)
def layer_parallel_ddp(engine: Engine, case: ModelCase) -> None:
    """Two copies, one rank each, in ``DistributedDataParallel(..., process_group=mesh["data"].get_group())``."""
    _check_copies(layer_parallel_ddp_run, engine, case)


@feature("layer_parallel in a mesh with FSDP2", families=(RESIDUAL,), slow=True)
def layer_parallel_fsdp(engine: Engine, case: ModelCase) -> None:
    """Likewise, in ``fully_shard(model, mesh=mesh["data"])``."""
    _check_copies(layer_parallel_fsdp_run, engine, case)


def _check_fit(
    engine: Engine, case: ModelCase, options: dict[str, Any], plain: dict[str, Any], tolerance: float = 1e-10
) -> None:
    from frameworks.trainer_runs import fit

    assert_equal_gradients(fit(engine, case, **options), train(engine, case, **plain), tolerance)


def _check_parts(run: Any, engine: Engine, case: ModelCase) -> None:
    first, second = on_two_ranks(run, engine, case)
    assert_equal_gradients(first | second, train(create_engine("backprop"), case))


def _check_copies(run: Any, engine: Engine, case: ModelCase) -> None:
    first, second = on_two_ranks(run, engine, case)
    assert_equal_gradients(second, first, tolerance=0.0)
    assert_equal_gradients(first, train(create_engine("backprop"), case))


def _check_ranks(run: Any, engine: Engine, case: ModelCase, accumulate: int = 1) -> None:
    first, second = on_two_ranks(run, engine, case)
    assert_equal_gradients(second, first, tolerance=0.0)
    if not engine.is_random:
        # Iterations of an approximation multiply the rounding of the ranks' sums.
        assert_equal_gradients(first, train(engine, case, accumulate=accumulate), tolerance=1e-9)
