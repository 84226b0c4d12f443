"""Engines under their names in the strategy registries of Lightning and Fabric."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gradfree.lightning.carriers import with_engine
from gradfree.registry import list_engines

# ``pip install lightning`` brings each of the two under two names, which know nothing of each other.
_REGISTRIES = {
    "lightning.pytorch": "StrategyRegistry",
    "pytorch_lightning": "StrategyRegistry",
    "lightning.fabric": "STRATEGY_REGISTRY",
    "lightning_fabric": "STRATEGY_REGISTRY",
}


# Lightning takes these for words of its own.
_RESERVED = ("auto",)


def register_engines() -> None:
    """Make every engine a strategy by its name, and by ``<name>_ddp``; names that are taken stay as they are.

    What Lightning takes for a word of its own is ``<name>_engine``.
    """
    for namespace, registry in _REGISTRIES.items():
        if find_spec(namespace.partition(".")[0]) is not None:
            strategies = import_module(f"{namespace}.strategies")
            _register(getattr(strategies, registry), strategies)


def _register(registry: Any, strategies: Any) -> None:
    for name in list_engines():
        for suffix, base, where in (
            ("", strategies.SingleDeviceStrategy, "one device"),
            ("_ddp", strategies.DDPStrategy, "several devices, DDP"),
        ):
            called = f"{name}_engine{suffix}" if name in _RESERVED else name + suffix
            if called not in registry:
                description = f"gradfree's engine {name}, {where}"
                registry.register(called, with_engine(base), description, engine=name)
