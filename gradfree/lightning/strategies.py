"""Registers engines by name in the strategy registries of Lightning and Fabric."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gradfree.lightning.engine_mixins import with_engine
from gradfree.registry import list_engines

# ``pip install lightning`` installs each of the two under two names, with separate registries.
_REGISTRIES = {
    "lightning.pytorch": "StrategyRegistry",
    "pytorch_lightning": "StrategyRegistry",
    "lightning.fabric": "STRATEGY_REGISTRY",
    "lightning_fabric": "STRATEGY_REGISTRY",
}


# Names with a meaning in Lightning.
_RESERVED = ("auto",)


def register_engines() -> None:
    """Register every engine as a strategy ``<name>`` and ``<name>_ddp``; existing names are kept.

    A name with a meaning in Lightning becomes ``<name>_engine``.
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
            strategy = f"{name}_engine{suffix}" if name in _RESERVED else name + suffix
            if strategy not in registry:
                description = f"gradfree's engine {name}, {where}"
                registry.register(strategy, with_engine(base), description, engine=name)
