"""Registers engines by name in the strategy registries of Lightning."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gradfree.lightning.engine_mixins import with_engine
from gradfree.registry import list_engines

# Names with a meaning in Lightning.
_RESERVED = ("auto",)


def register_engines() -> None:
    """Register every engine as a strategy ``<name>`` and ``<name>_ddp``; existing names are kept.

    A name with a meaning in Lightning becomes ``<name>_engine``.
    """
    # Lightning is installed under one or both of these names, with separate registries.
    for namespace in ("lightning.pytorch", "pytorch_lightning"):
        if find_spec(namespace.partition(".")[0]) is not None:
            _register(import_module(f"{namespace}.strategies"))


def _register(strategies: Any) -> None:
    for name in list_engines():
        for suffix, base, where in (
            ("", strategies.SingleDeviceStrategy, "one device"),
            ("_ddp", strategies.DDPStrategy, "several devices, DDP"),
        ):
            strategy = f"{name}_engine{suffix}" if name in _RESERVED else name + suffix
            if strategy not in strategies.StrategyRegistry:
                description = f"gradfree's engine {name}, {where}"
                strategies.StrategyRegistry.register(strategy, with_engine(base), description, engine=name)
