"""The device in Lightning: ``Trainer(accelerator="pretend")``."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.accelerators import ACCELERATOR_REGISTRY
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.plugins import MixedPrecision

NAME = "pretend"


class PretendAccelerator(Accelerator):
    """There is one."""

    def setup_device(self, device: torch.device) -> None:
        """Do nothing."""

    def setup(self, trainer: Trainer) -> None:
        """Have autocast, which Lightning has for CUDA and the CPU, for this device."""
        if isinstance(trainer.precision_plugin, MixedPrecision):
            trainer.precision_plugin.device = NAME

    def teardown(self) -> None:
        """Do nothing."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """Return how many are asked for."""
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """Return them."""
        return [torch.device(NAME, index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        """Return how many there are."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Return that it is there."""
        return True

    @staticmethod
    def name() -> str:
        """Return its name."""
        return NAME


def register() -> None:
    """Tell Lightning and Fabric of it."""
    for registry in (AcceleratorRegistry, ACCELERATOR_REGISTRY):
        registry.register(NAME, PretendAccelerator)
