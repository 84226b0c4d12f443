"""Exact resumption of a training: random states in checkpoints."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from gradfree.torchside.random_state import RandomState


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
