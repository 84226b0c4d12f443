"""Exact resumption of a training in the middle of an epoch: position of the loader, random states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from gradfree.torchside.random_state import RandomState


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that continues within an epoch after a checkpoint.

    Lightning saves the state of loaders that have one. The order of the examples must depend only on ``set_epoch``:
    use torch's ``DistributedSampler``, also on one device, or a sampler that does not shuffle. Random numbers of the
    data set itself are not repeated. Arguments are those of ``DataLoader``. Without a ``generator`` the loader creates
    one, so that it does not change the random numbers of dropout.
    """

    _place = (-1, 0)
    """The epoch, and the number of its batches that were returned."""
    _resumed = (-1, 0)
    """The epoch and number of batches from which to continue."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(torch.initial_seed())

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the epoch's batches; after a checkpoint the remaining ones."""
        epoch = getattr(self.sampler, "epoch", 0)
        # After a checkpoint at the end of an epoch, the whole next epoch follows.
        done = self._resumed[1] if self._resumed[0] == epoch else 0
        if done and not hasattr(self.sampler, "set_epoch") and done >= len(self):
            # This sampler has no epoch numbers, so after the last batch the next epoch begins.
            done = 0
        self._resumed = ResumableLoader._resumed
        for batch in islice(super().__iter__(), done, None):
            done += 1
            self._place = epoch, done
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the place in the epoch."""
        epoch, batches = self._place
        return {"epoch": epoch, "batches": batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the place in ``state`` when that epoch is next iterated."""
        self._place = self._resumed = state["epoch"], state["batches"]


class RandomStates(pl.Callback):
    """Saves torch's random states in checkpoints, so that dropout continues with the same random numbers.

    With several processes, all of them load the state of the first.
    """

    _KEY = "random_states"

    def __init__(self) -> None:
        self._loaded: RandomState | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the random states of the CPU and of the device to the checkpoint."""
        state = RandomState.of(trainer.strategy.root_device)
        checkpoint[self._KEY] = {"cpu": state.cpu, state.device.type: state.cpu if state.own is None else state.own}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Read the states; that of another type of device is ignored."""
        device, states = trainer.strategy.root_device, checkpoint.get(self._KEY)
        if states is not None:
            own = None if device.type == "cpu" else states.get(device.type)
            self._loaded = RandomState(device, states["cpu"], own)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the states, when only the training draws random numbers from now on."""
        if self._loaded is not None:
            self._loaded.restore()
            self._loaded = None
