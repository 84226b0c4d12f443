"""A Lightning strategy that trains with an engine on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from gradfree.attaching import Handle
from gradfree.engine import Engine
from gradfree.registry import list_engines, resolve_engine


class EngineStrategy(SingleDeviceStrategy):
    """Train a LightningModule with an engine, on the one device that the Trainer picks.

    The engine is attached before fitting and taken off afterwards; the module, its callbacks and its checkpoints
    are those of an ordinary run.

    Args:
        engine: an engine's name, or an engine.
        chains: as in :meth:`gradfree.Engine.attach`, as module paths of the LightningModule.
        lean: as in :meth:`gradfree.Engine.attach`.
        accelerator: set by the Trainer.
        checkpoint_io: set by the Trainer.
        precision_plugin: set by the Trainer.
        **options: the engine's options, if it is given by name.

    Raises:
        ValueError: more than one device or node.
    """

    def __init__(
        self,
        engine: str | Engine = "highway_bp",
        *,
        chains: Sequence[str] | None = None,
        lean: bool = False,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ):
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.engine = resolve_engine(engine, options)
        self.chains, self.lean = chains, lean
        self._devices: list[torch.device] = []
        self._handle = Handle()
        self._restored: dict[str, Any] = {}

    # The Trainer hands a strategy that was made without a device its devices and nodes through these two; a
    # plain SingleDeviceStrategy has neither, so it would stay on the CPU, and take devices=2 for one in silence.
    @property
    def parallel_devices(self) -> list[torch.device]:
        """The Trainer's devices, once it has set them."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(_one_only(self.engine, f"devices={len(devices)}"))
        self._devices = devices
        self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        """Always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        if nodes != 1:
            raise ValueError(_one_only(self.engine, f"num_nodes={nodes}"))

    def setup(self, trainer: pl.Trainer) -> None:
        """Attach the engine, if the Trainer is to fit, and set up as usual."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._handle = self.engine.attach(trainer.lightning_module, self.chains, lean=self.lean)
            self._handle.load_state_dict(self._restored)
        self._restored = {}
        super().setup(trainer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save as usual, with what the engine keeps from pass to pass."""
        super().save_checkpoint(checkpoint | {"gradfree": self._handle.state_dict()}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load as usual; the engine takes up what it kept."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        # Lightning restores before it sets a strategy up: the engine is attached only then.
        self._restored = checkpoint.get("gradfree", {})
        return checkpoint

    def teardown(self) -> None:
        """Take the engine off and clean up as usual."""
        self._handle.detach()
        # Another fit goes on from here.
        self._restored = self._handle.state_dict()
        super().teardown()


class _SeveralDevices:
    """Stands for ``<engine>_ddp`` until it exists."""

    def __init__(self, engine: str):
        raise NotImplementedError(
            f"strategy='{engine}_ddp' does not exist yet: engines train on one device, strategy='{engine}' with "
            "devices=1."
        )


def _one_only(engine: Engine, asked: str) -> str:
    return (
        f"{type(engine).__name__} trains on one device so far, but the Trainer was given {asked}. Use devices=1, or "
        "a strategy of Lightning's own (strategy='ddp') without an engine."
    )


def register_engines() -> None:
    """Make every engine a strategy by its name; names that are taken stay as they are."""
    for name in list_engines():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, EngineStrategy, f"gradfree's engine {name}, one device", engine=name)
            StrategyRegistry.register(f"{name}_ddp", _SeveralDevices, "not available yet", engine=name)
