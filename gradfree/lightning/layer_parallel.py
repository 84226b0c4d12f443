"""One run of a model's blocks on each device, as a strategy of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from gradfree.engines.discovery import Chains
from gradfree.engines.engine import Engine
from gradfree.errors import ChainError
from gradfree.ranks.stage import Stage, layer_parallel
from gradfree.registry import engine_class, resolve_engine


class LayerParallelStrategy(DDPStrategy):
    """Trains one model on several devices, each of which holds one run of its blocks; see :func:`layer_parallel`.

    Devices beyond ``stages`` hold copies of the model, each for its share of the data, by DDP. All devices of a copy are
    given the same batches. Checkpoints are the whole model's, as one device writes them, and are resumed on any number.

    Args:
        engine: "highway_bp", "fixed_point" or "backprop", or such an engine.
        stages: how many devices share one model; by default all.
        model: the path, in the LightningModule, of the module that is called on batches and has the blocks; by default
            its only child that has weights.
        chains: as in :func:`layer_parallel`, with paths in that module; likewise all that follow.
        costs: of each block.
        first: what the first device is to hold.
        last: what the last one is to hold.
        taps: blocks whose outputs are used behind the chain.
        residual: as in :meth:`gradfree.Engine.attach`.
        **options: the engine's, if it is given by name, and those of ``DDPStrategy``.

    Attributes:
        stage: what this device holds, once the Trainer has set it up.
    """

    stage: Stage | None = None
    _mesh: DeviceMesh | None = None

    def __init__(
        self,
        engine: str | Engine = "highway_bp",
        *,
        stages: int | None = None,
        model: str | None = None,
        chains: Chains | None = None,
        costs: Sequence[float] | None = None,
        first: Sequence[str] = (),
        last: Sequence[str] = (),
        taps: Sequence[str] = (),
        residual: float | None = None,
        **options: Any,
    ):
        if stages is not None and (isinstance(stages, bool) or not isinstance(stages, int) or stages < 1):
            raise ValueError(f"LayerParallelStrategy: stages must be a number of devices, not {stages!r}.")
        known = {f.name for f in fields(engine_class(engine))} if isinstance(engine, str) else set()
        self.engine = resolve_engine(engine, {name: options.pop(name) for name in list(options) if name in known})
        self.stages, self.path = stages, model
        self._placed = {
            "chains": chains, "costs": costs, "first": first, "last": last, "taps": taps, "residual": residual,
        }  # fmt: skip
        super().__init__(**options)
