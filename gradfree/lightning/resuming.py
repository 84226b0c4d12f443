"""What makes a training that was stopped in the middle of an epoch go on as if it had not been."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from gradfree.torchside.random_state import RandomState


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that a checkpoint brings back to its place in the epoch.

    Lightning keeps the state of any loader that has one. Which examples come at which place is the sampler's to
    repeat: it takes one whose order depends on nothing but ``set_epoch``, as torch's ``DistributedSampler``, also on
    one device, or one that shuffles nothing. What the data set itself draws at random is not repeated. Arguments as of
    ``DataLoader``; without a ``generator`` the loader has one of its own, so that its draws are none of the dropout's.
    """

    _place = (-1, 0)
    """The epoch, and how many of its batches were handed out."""
    _resumed = (-1, 0)
    """The place to go on from."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(torch.initial_seed())

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the epoch's batches, all of them or those that are left."""
        epoch = getattr(self.sampler, "epoch", 0)
        # A checkpoint from the end of an epoch is followed by the whole of the next one.
        done = self._resumed[1] if self._resumed[0] == epoch else 0
        if done and not hasattr(self.sampler, "set_epoch") and done >= len(self):
            # Its epochs have no numbers: behind the last batch begins the next one.
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
        """Go on from the place in ``state`` when the loader is next iterated over in that epoch."""
        self._place = self._resumed = state["epoch"], state["batches"]


class RandomStates(pl.Callback):
    """Keeps the state of torch's random numbers in checkpoints, so that dropout goes on where it stopped.

    With several processes, the first one's state is everybody's.
    """

    _KEY = "random_states"

    def __init__(self) -> None:
        self._loaded: RandomState | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the states of the CPU's generator and of the device's own."""
        state = RandomState.of(trainer.strategy.root_device)
        checkpoint[self._KEY] = {"cpu": state.cpu, state.device.type: state.cpu if state.own is None else state.own}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the states out, that of another kind of device left out."""
        device, states = trainer.strategy.root_device, checkpoint.get(self._KEY)
        if states is not None:
            own = None if device.type == "cpu" else states.get(device.type)
            self._loaded = RandomState(device, states["cpu"], own)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go back to the states, now that nothing but the training draws random numbers."""
        if self._loaded is not None:
            self._loaded.restore()
            self._loaded = None
