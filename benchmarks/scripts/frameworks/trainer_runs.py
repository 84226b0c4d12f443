"""Training a case in Lightning, on one device or one per rank."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from frameworks.training import Updates, batches, loss_of, optimizer_of, updates_of
from torch import Tensor
from torch.utils.data import DataLoader

import gradfree.lightning
from gradfree.engines.engine import Engine
from gradfree.testing.cases.cases import ModelCase, Specimen


def trainer_of(strategy: Any, device: str, devices: int = 1, epochs: int = 1, **options: Any) -> pl.Trainer:
    """Return a Trainer without logs, checkpoints and progress bars."""
    return pl.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator=torch.device(device).type,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's hints about workers, devices and loggers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class Module(pl.LightningModule):
    """A LightningModule without any code for gradfree."""

    def __init__(self, specimen: Specimen, manual: bool = False):
        super().__init__()
        self.net = specimen.model
        self.automatic_optimization = not manual

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the loss; with manual optimization, take the step first."""
        loss = loss_of(self.net(batch))
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return optimizer_of(self.net)


def fit(
    engine: Engine,
    case: ModelCase,
    dtype: torch.dtype = torch.float64,
    manual: bool = False,
    rank: int = 0,
    devices: int = 1,
    **options: Any,
) -> Updates:
    """Return the changes of the weights by ``Trainer(strategy=...).fit``; ``options`` go to the Trainer."""
    specimen = Specimen(case, dtype)
    with quiet():
        _trainer(engine, case, devices, **options).fit(Module(specimen, manual), _loader(specimen, rank, devices))
    return updates_of(specimen)


def layer_parallel_fit(engine: Engine, case: ModelCase, devices: int) -> Updates:
    """Return the changes of this device's weights; each device has a part of the blocks."""
    specimen = Specimen(case)
    strategy = gradfree.lightning.LayerParallelStrategy(engine, chains=[case.chain])
    with quiet():
        trainer_of(strategy, case.device, devices).fit(Module(specimen), _loader(specimen))
    return updates_of(specimen)


def fit_and_resume(engine: Engine, case: ModelCase) -> Updates:
    """Return the changes over two epochs; another model resumes from a checkpoint after the first epoch."""
    first, second = Specimen(case), Specimen(case)
    with quiet(), TemporaryDirectory() as folder:
        half = _trainer(engine, case, 1)
        half.fit(Module(first), _loader(first))
        half.save_checkpoint(Path(folder) / "half.ckpt")
        with torch.no_grad():
            for parameter in second.model.parameters():
                parameter.zero_()
        _trainer(engine, case, 1, epochs=2).fit(Module(second), _loader(second), ckpt_path=Path(folder) / "half.ckpt")
    return updates_of(second)


def _loader(specimen: Specimen, rank: int = 0, devices: int = 1) -> Any:
    """Return this rank's part of every batch."""
    return DataLoader([x.chunk(devices)[rank] for x in batches(specimen)], batch_size=None)  # type: ignore[arg-type]


def _trainer(engine: Engine, case: ModelCase, devices: int, epochs: int = 1, **options: Any) -> pl.Trainer:
    kind = gradfree.lightning.EngineStrategy if devices == 1 else gradfree.lightning.EngineDDPStrategy
    return trainer_of(kind(engine, chains=[f"net.{case.chain}"]), case.device, devices, epochs, **options)
