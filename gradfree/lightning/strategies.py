"""Strategies of Lightning's Trainer with an engine: mixins for its strategy classes, and their names.

The engine is attached before the strategy wraps the model (in DDP, for example), and is saved in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from itertools import product
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from gradfree.chains.handle import Handle
from gradfree.chains.lesson import Lesson
from gradfree.engines.discovery import Chains
from gradfree.engines.engine import Engine, named_baseline
from gradfree.registry import engine_class, list_engines, resolve_engine
from gradfree.wording import did_you_mean

_KEY = "gradfree"


def split_options(
    name: str, base: type, engine: str | Engine, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the engine, and those of a strategy class.

    Args:
        name: the strategy's, for messages.
        base: the strategy class of Lightning.
        engine: an engine's name, or an engine, which takes no more options.
        options: of both.

    Raises:
        TypeError: an option that neither of them has.
    """
    own = [f.name for f in fields(engine_class(engine))] if isinstance(engine, str) else []
    others = _options_of(base)
    for option in options:
        if others is not None and option not in own and option not in others:
            raise TypeError(
                f"{name}: unexpected argument {option!r}. Options of {engine!r}: {', '.join(own) or 'none'}."
                + did_you_mean(option, [*own, *others])
            )
    for_engine = {option: value for option, value in options.items() if option in own}
    return for_engine, {option: value for option, value in options.items() if option not in own}


def _options_of(base: type) -> list[str] | None:
    """Return the names of the options of a strategy class; ``None`` if it may have others."""
    strategy: Any = base
    options = signature(strategy).parameters
    if all(p.kind is not Parameter.VAR_KEYWORD for p in options.values()):
        return [*options]
    made_by = next(kind.__name__ for kind in base.__mro__ if "__init__" in vars(kind))
    _module, *of_ddp = signature(DistributedDataParallel).parameters
    return [*options, *of_ddp] if made_by == "DDPStrategy" else None


class EngineMixin:
    """A strategy with an engine; the mixin comes before the strategy class among the bases.

    The engine is attached during ``fit``. One that changes how a model runs without gradients, too, is also attached
    during ``validate``, ``test`` and ``predict``.

    Args:
        engine: an engine's name, or an engine.
        chains: as in :meth:`gradfree.Engine.attach`, with module paths in the strategy's model.
        batched: as in :meth:`gradfree.Engine.attach`.
        residual: as in :meth:`gradfree.Engine.attach`.
        **options: the engine's options, if it is given by name, and the strategy's.

    Attributes:
        engine: the engine.
        handle: of the last loop that the engine was attached in.

    Raises:
        TypeError: an option that neither the engine nor the strategy has.
    """

    def __init__(
        self,
        engine: str | Engine,
        *,
        chains: Chains | None = None,
        batched: Literal["auto"] | bool = "auto",
        residual: float | None = None,
        **options: Any,
    ):
        own, others = split_options(type(self).__name__, self._base, engine, options)
        super().__init__(**others)
        self.engine = resolve_engine(engine, own)
        self.chains, self.batched, self.residual = chains, batched, residual
        self.handle = Handle()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the strategy's base class, because this subclass is created at run time."""
        return _restore, (self._base,), self.__dict__

    _base: type
    """The strategy class without an engine."""
    _restored: dict[str, Any] | None = None
    """The engine's state to load when it is attached."""
    world_size: int
    """The strategy's number of ranks."""

    @property
    def accelerator(self) -> Any:
        """The accelerator, which the Trainer sets."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        # Only the accelerator shows whether the Trainer is lightning's or pytorch_lightning's: same code, other types.
        if base := _counterpart(self._base):
            package = base.__module__.partition(".")[0]
            if isinstance(accelerator, import_module(f"{package}.accelerators").Accelerator):
                self.__class__ = with_engine(base)
        self._accelerator = accelerator

    def setup(self, trainer: Any) -> None:
        """Attach the engine, and set up as usual."""
        if trainer.state.fn == "fit" or self.engine.evaluates:
            # First, since tolerances are checked against the weights' dtype.
            self.precision_plugin.convert_module(trainer.lightning_module)  # type: ignore[attr-defined]
            before = self.handle
            with named_baseline():
                self.handle = self.engine.attach(
                    trainer.lightning_module, self.chains, batched=self.batched, residual=self.residual
                )
            if self._restored is None and before.blocks == self.handle.blocks:
                # Another loop over the same model continues with the engine's state of the last one.
                self._restored = before.state_dict()
            self.handle.load_state_dict(self._restored or {})
        self._restored = None
        super().setup(trainer)  # type: ignore[misc]

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run it as usual; of a batch (inputs, targets), give the targets to an engine that learns from them."""
        if "targets" in self.engine.needs:
            lesson = Lesson(targets=batch[1] if isinstance(batch, list | tuple) and len(batch) == 2 else None)
            for attachment in self.handle.attachments.values():
                attachment.lesson = lesson
        return super().training_step(batch, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the step as usual, then average the engine's running means over ranks.

        Warns, once, if gradients have bypassed the engine.
        """
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        self.handle.watch()
        if self.world_size > 1:
            self.handle.average_over_ranks()
        return result

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save as usual, with the engine's state."""
        super().save_checkpoint(checkpoint | {_KEY: self.handle.state_dict()}, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load as usual, with the engine's state."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        state = checkpoint.get(_KEY, {})
        # Lightning loads before the setup of most strategies, and again after a search for a learning rate.
        if self.handle.attached:
            self.handle.load_state_dict(state)
        else:
            self._restored = state
        return checkpoint

    def teardown(self) -> None:
        """Detach the engine and clean up as usual."""
        self.handle.detach()
        super().teardown()  # type: ignore[misc]


class OneDevice:
    """Takes the device from the Trainer, and raises for more than one.

    The Trainer sets the devices and nodes of a strategy object by these two properties. ``SingleDeviceStrategy`` has
    neither: it would stay on the CPU, and silently use one device for devices=2.
    """

    engine: Engine
    _root_device: torch.device
    _devices: Sequence[torch.device] = ()

    @property
    def parallel_devices(self) -> Sequence[torch.device]:
        """The device in a sequence; empty until it is set."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(self._one_only(f"devices={len(devices)}"))
        self._devices = devices
        self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        """Always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        if nodes != 1:
            raise ValueError(self._one_only(f"num_nodes={nodes}"))

    def _one_only(self, asked: str) -> str:
        return (
            f"this strategy trains with {type(self.engine).__name__} on one device, but was given {asked}. Use the "
            "strategy '<engine>_ddp', or devices=1, num_nodes=1."
        )


@cache
def with_engine(base: type) -> type[Any]:
    """Return the subclass of ``base``, a strategy class of Lightning's Trainer, that has an engine.

    Raises:
        TypeError: ``base`` is not such a class.
    """
    names = {kind.__name__ for kind in base.__mro__}
    if "Strategy" not in names or hasattr(base, "setup_module"):
        raise TypeError(
            f"base must be a strategy class of Lightning's Trainer, not {base!r}. In a loop of Fabric, call "
            "engine.attach(model) before fabric.setup(model)."
        )
    parents = (EngineMixin, OneDevice, base) if "SingleDeviceStrategy" in names else (EngineMixin, base)
    attributes = {"_base": base, "__module__": __name__, "__doc__": EngineMixin.__doc__}
    kind = type(f"Engine{base.__name__}", parents, attributes)
    if other := _counterpart(base):
        strategy: Any = next(c for c in other.__mro__ if c.__name__ == "Strategy")
        strategy.register(kind)
    return kind


def _counterpart(base: type) -> Any:
    """Return the class of the same name in ``pytorch_lightning``, if ``base`` is from ``lightning.pytorch``."""
    if not base.__module__.startswith("lightning.pytorch.") or find_spec("pytorch_lightning") is None:
        return None
    return getattr(import_module("pytorch_lightning.strategies"), base.__name__, None)


def _restore(base: type) -> Any:
    kind = with_engine(base)
    return object.__new__(kind)


def register_engines() -> None:
    """Register every engine as a strategy ``<name>`` and ``<name>_ddp``; existing names are kept.

    ``auto`` becomes ``auto_engine``, because it has a meaning in Lightning.
    """
    # Lightning is installed under one or both of these names, with separate registries.
    for namespace in ("lightning.pytorch", "pytorch_lightning"):
        if find_spec(namespace.partition(".")[0]) is None:
            continue
        strategies = import_module(f"{namespace}.strategies")
        kinds = ("", strategies.SingleDeviceStrategy, "one device"), ("_ddp", strategies.DDPStrategy, "several devices")
        for name, (suffix, base, where) in product(list_engines(), kinds):
            strategy = f"auto_engine{suffix}" if name == "auto" else name + suffix
            if strategy not in strategies.StrategyRegistry:
                description = f"gradfree's engine {name}, {where}"
                strategies.StrategyRegistry.register(strategy, with_engine(base), description, engine=name)
