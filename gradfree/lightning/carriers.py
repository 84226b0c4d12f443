"""What makes any of Lightning's and Fabric's strategies, or anyone's built on them, train with an engine.

The engine is put on the model before the strategy wraps it (in DDP, say), and goes into checkpoints beside it.
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


class Carrier:
    """A strategy with an engine; goes before the strategy's own class in a subclass.

    Args:
        engine: an engine's name, or an engine.
        chains: as in :meth:`gradfree.Engine.attach`, as module paths of the model that the strategy is given.
        batched: likewise.
        **options: the engine's options, if it is given by name, and the strategy's own.

    Attributes:
        engine: the engine.
        handles: of the engine, one for each module that it is attached to, in the order in which they were set up.

    Raises:
        TypeError: an option that neither has.
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
        """Pickle by the strategy's own class: the subclass is made at run time."""
        return _restore, (self._base,), self.__dict__

    _base: type
    """The strategy's own class."""
    world_size: int
    """Of the strategy: how many ranks train."""

    def _attached(self, model: nn.Module) -> Handle:
        return self.engine.attach(model, self.chains, batched=self.batched)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the step as usual; behind it, what each rank's batches have moved is the same on all of them again.

        Warns, once, if gradients have bypassed the engine.
        """
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        for handle in self.handles:
            handle.watch()
            if self.world_size > 1:
                handle.average_over_ranks()
        return result

    def teardown(self) -> None:
        """Take the engine off and clean up as usual."""
        for handle in self.handles:
            handle.detach()
        super().teardown()  # type: ignore[misc]


class TrainerCarrier(Carrier):
    """For strategies of Lightning's Trainer: attached while it fits."""

    _restored: dict[str, Any] | None = None
    """What the engine takes up when it is attached."""

    @property
    def handle(self) -> Handle:
        """The engine's on the module of the last fit."""
        return self.handles[0] if self.handles else Handle()

    @property
    def accelerator(self) -> Any:
        """What the Trainer sets."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        # Only this shows which package the Trainer is of: two have the same code, with separate types.
        if (base := _counterpart(self._base)) and isinstance(accelerator, _accelerators(base)):
            self.__class__ = with_engine(base)
        self._accelerator = accelerator

    def setup(self, trainer: Any) -> None:
        """Attach the engine, if the Trainer is to fit, and set up as usual."""
        if trainer.state.fn == "fit":
            before, self.handles = self.handle, [self._attached(trainer.lightning_module)]
            if self._restored is None and before.blocks == self.handle.blocks:
                # Another fit of the same model goes on from where the last one ended.
                self._restored = before.state_dict()
            self.handle.load_state_dict(self._restored or {})
        self._restored = None
        super().setup(trainer)  # type: ignore[misc]

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save as usual, with what the engine keeps from pass to pass."""
        super().save_checkpoint(checkpoint | {_KEY: self.handle.state_dict()}, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load as usual; the engine takes up what it kept."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        state = checkpoint.get(_KEY, {})
        # Lightning restores before it sets most strategies up, and again behind a search for a learning rate.
        if self.handle.attached:
            self.handle.load_state_dict(state)
        else:
            self._restored = state
        return checkpoint


class FabricCarrier(Carrier):
    """For strategies of Fabric: attached to each module that is set up, with ``fabric.setup``."""

    _restored: Sequence[Mapping[str, Any]] = ()
    """What the engine takes up when it is attached, module by module in the order of their setup."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Attach the engine and set up as usual."""
        self.handles.append(self._attached(module))
        self._take_up(len(self.handles) - 1)
        return super().setup_module(module)  # type: ignore[misc]

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save as usual, with what the engine keeps of each module from pass to pass."""
        kept = [handle.state_dict() for handle in self.handles]
        super().save_checkpoint(path, state | {_KEY: kept}, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load as usual; the engine takes up what it kept."""
        rest: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        kept = rest.pop(_KEY, ())
        # A Trainer's checkpoint has that of its only module.
        self._restored = [kept] if isinstance(kept, Mapping) else kept
        for number in range(len(self.handles)):
            self._take_up(number)
        return rest

    def _take_up(self, number: int) -> None:
        self.handles[number].load_state_dict(self._restored[number] if number < len(self._restored) else {})


class OneDevice:
    """Takes the device from the Trainer or Fabric, and refuses more than one.

    Both hand a strategy that was made without a device its devices and nodes through these two properties; a plain
    ``SingleDeviceStrategy`` has neither, so it would stay on the CPU, and take devices=2 for one in silence.
    """

    engine: Engine
    _root_device: torch.device
    _devices: Sequence[torch.device] = ()

    @property
    def parallel_devices(self) -> Sequence[torch.device]:
        """The device, once it is set."""
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
    """Return the subclass of ``base``, a strategy class of Lightning or Fabric, that carries an engine.

    Raises:
        TypeError: ``base`` is no strategy class.
    """
    names = {kind.__name__ for kind in base.__mro__}
    if "Strategy" not in names:
        raise TypeError(f"base must be a strategy class of Lightning or Fabric, not {base!r}.")
    carrier = FabricCarrier if hasattr(base, "setup_module") else TrainerCarrier
    parents = (carrier, OneDevice, base) if "SingleDeviceStrategy" in names else (carrier, base)
    kind = type(f"Engine{base.__name__}", parents, {"_base": base, "__module__": __name__, "__doc__": carrier.__doc__})
    if other := _counterpart(base):
        strategy: Any = next(c for c in other.__mro__ if c.__name__ == "Strategy")
        strategy.register(kind)
    return kind


def _counterpart(base: type) -> Any:
    """Return the class of this name in ``pytorch_lightning`` if ``base`` is ``lightning.pytorch``'s."""
    if not base.__module__.startswith("lightning.pytorch.") or find_spec("pytorch_lightning") is None:
        return None
    return getattr(import_module("pytorch_lightning.strategies"), base.__name__, None)


def _accelerators(base: type) -> type[Any]:
    """Return the class of the accelerators of the package that ``base`` is of."""
    accelerator: type[Any] = import_module(f"{base.__module__.partition('.')[0]}.accelerators").Accelerator
    return accelerator


def _restore(base: type) -> Any:
    kind = with_engine(base)
    return object.__new__(kind)


def _refuse_unknown(kind: type, engine: str | Engine, options: dict[str, Any], known: set[str]) -> None:
    base = kind.__mro__[kind.__mro__.index(Carrier) + 1 :]
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
