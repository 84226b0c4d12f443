"""Mixins that add an engine to a strategy class of Lightning or Fabric.

The engine is attached before the strategy wraps the model (in DDP, for example), and is saved in its checkpoints.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from gradfree.chains.handle import Handle
from gradfree.engines.discovery import Chains
from gradfree.engines.engine import Engine
from gradfree.registry import engine_class, resolve_engine

if TYPE_CHECKING:
    import torch

_KEY = "gradfree"


class EngineMixin:
    """A strategy with an engine; the mixin comes before the strategy class among the bases.

    Args:
        engine: an engine's name, or an engine.
        chains: as in :meth:`gradfree.Engine.attach`, with module paths in the strategy's model.
        batched: as in :meth:`gradfree.Engine.attach`.
        **options: the engine's options, if it is given by name, and the strategy's.

    Attributes:
        engine: the engine.
        handles: one for each module with the engine, in the order of their setup.

    Raises:
        TypeError: an option that neither the engine nor the strategy has.
    """

    def __init__(
        self,
        engine: str | Engine = "highway_bp",
        *,
        chains: Chains | None = None,
        batched: Literal["auto"] | bool = "auto",
        **options: Any,
    ):
        known = {f.name for f in fields(engine_class(engine))} if isinstance(engine, str) else set()
        own = {name: options.pop(name) for name in list(options) if name in known}
        _refuse_unknown(type(self), engine, options, known)
        super().__init__(**options)
        self.engine = resolve_engine(engine, own)
        self.chains, self.batched = chains, batched
        self.handles: list[Handle] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the strategy's base class, because this subclass is created at run time."""
        return _restore, (self._base,), self.__dict__

    _base: type
    """The strategy class without an engine."""
    world_size: int
    """The strategy's number of ranks."""

    def _attached(self, model: nn.Module) -> Handle:
        return self.engine.attach(model, self.chains, batched=self.batched)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the step as usual, then average the engine's running means over ranks.

        Warns, once, if gradients have bypassed the engine.
        """
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        for handle in self.handles:
            handle.watch()
            if self.world_size > 1:
                handle.average_over_ranks()
        return result

    def teardown(self) -> None:
        """Detach the engine and clean up as usual."""
        for handle in self.handles:
            handle.detach()
        super().teardown()  # type: ignore[misc]


class TrainerEngineMixin(EngineMixin):
    """For strategies of Lightning's Trainer: the engine is attached during ``fit``."""

    _restored: dict[str, Any] | None = None
    """The engine's state to load when it is attached."""

    @property
    def handle(self) -> Handle:
        """The handle of the last ``fit``."""
        return self.handles[0] if self.handles else Handle()

    @property
    def accelerator(self) -> Any:
        """The accelerator, which the Trainer sets."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        # Only the accelerator shows whether the Trainer is lightning's or pytorch_lightning's: same code, other types.
        if (base := _counterpart(self._base)) and isinstance(accelerator, _accelerators(base)):
            self.__class__ = with_engine(base)
        self._accelerator = accelerator

    def setup(self, trainer: Any) -> None:
        """Attach the engine in a ``fit``, and set up as usual."""
        if trainer.state.fn == "fit":
            before, self.handles = self.handle, [self._attached(trainer.lightning_module)]
            if self._restored is None and before.blocks == self.handle.blocks:
                # Another fit of the same model continues with the engine's state of the last one.
                self._restored = before.state_dict()
            self.handle.load_state_dict(self._restored or {})
        self._restored = None
        super().setup(trainer)  # type: ignore[misc]

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


class FabricEngineMixin(EngineMixin):
    """For strategies of Fabric: the engine is attached to each module in ``fabric.setup``."""

    _restored: Sequence[Mapping[str, Any]] = ()
    """The engine's states to load when it is attached, in the order of the modules' setup."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Attach the engine and set up as usual."""
        self.handles.append(self._attached(module))
        self._load_state(len(self.handles) - 1)
        return super().setup_module(module)  # type: ignore[misc]

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save as usual, with the engine's state for each module."""
        kept = [handle.state_dict() for handle in self.handles]
        super().save_checkpoint(path, state | {_KEY: kept}, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load as usual, with the engine's states."""
        rest: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        kept = rest.pop(_KEY, ())
        # A Trainer's checkpoint has the state of its only module, not a list.
        self._restored = [kept] if isinstance(kept, Mapping) else kept
        for number in range(len(self.handles)):
            self._load_state(number)
        return rest

    def _load_state(self, number: int) -> None:
        self.handles[number].load_state_dict(self._restored[number] if number < len(self._restored) else {})


class OneDevice:
    """Takes the device from the Trainer or Fabric, and raises for more than one.

    Both set the devices and nodes of a strategy object by these two properties. ``SingleDeviceStrategy`` has neither:
    it would stay on the CPU, and silently use one device for devices=2.
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
    """Return the subclass of ``base``, a strategy class of Lightning or Fabric, that has an engine.

    Raises:
        TypeError: ``base`` is not a strategy class.
    """
    names = {kind.__name__ for kind in base.__mro__}
    if "Strategy" not in names:
        raise TypeError(f"base must be a strategy class of Lightning or Fabric, not {base!r}.")
    mixin = FabricEngineMixin if hasattr(base, "setup_module") else TrainerEngineMixin
    parents = (mixin, OneDevice, base) if "SingleDeviceStrategy" in names else (mixin, base)
    kind = type(f"Engine{base.__name__}", parents, {"_base": base, "__module__": __name__, "__doc__": mixin.__doc__})
    if other := _counterpart(base):
        strategy: Any = next(c for c in other.__mro__ if c.__name__ == "Strategy")
        strategy.register(kind)
    return kind


def _counterpart(base: type) -> Any:
    """Return the class of the same name in ``pytorch_lightning``, if ``base`` is from ``lightning.pytorch``."""
    if not base.__module__.startswith("lightning.pytorch.") or find_spec("pytorch_lightning") is None:
        return None
    return getattr(import_module("pytorch_lightning.strategies"), base.__name__, None)


def _accelerators(base: type) -> type[Any]:
    """Return the base class of accelerators in the package of ``base``."""
    accelerator: type[Any] = import_module(f"{base.__module__.partition('.')[0]}.accelerators").Accelerator
    return accelerator


def _restore(base: type) -> Any:
    kind = with_engine(base)
    return object.__new__(kind)


def _refuse_unknown(kind: type, engine: str | Engine, options: dict[str, Any], known: set[str]) -> None:
    base = kind.__mro__[kind.__mro__.index(EngineMixin) + 1 :]
    strategy = next(c for c in base if "__init__" in c.__dict__)
    parameters = inspect.signature(strategy).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    taken = [p.name for p in parameters]
    if unknown := sorted(options.keys() - set(taken)):
        raise TypeError(
            f"neither {engine!r} nor {strategy.__name__} has an option {', '.join(map(repr, unknown))}; the engine's "
            f"are {', '.join(sorted(known)) or 'none'}, the strategy's {', '.join(taken)}."
        )
