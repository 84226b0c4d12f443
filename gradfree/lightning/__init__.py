"""Engines as strategies of Lightning's Trainer and of Fabric; importing this registers every engine under its name.

``Trainer(strategy="highway_bp")`` after ``import gradfree.lightning``, or on several devices
``Trainer(strategy="highway_bp_ddp", devices=2)``; with options
``Trainer(strategy=gradfree.lightning.EngineStrategy("highway_bp", iterations=4))``.
"""

from typing import Any

from gradfree.engines.engine import Engine
from gradfree.extras import needs_extra

with needs_extra("lightning"):
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

    from gradfree.lightning.callbacks import EngineFigures, GradientFidelity, WatchGradient
    from gradfree.lightning.carriers import with_engine
    from gradfree.lightning.layer_parallel import LayerParallelStrategy
    from gradfree.lightning.modules import Classifier
    from gradfree.lightning.resuming import RandomStates, ResumableLoader
    from gradfree.lightning.strategies import register_engines

EngineStrategy = with_engine(SingleDeviceStrategy)
"""Trains with an engine on the one device that the Trainer picks."""

EngineDDPStrategy = with_engine(DDPStrategy)
"""Trains with an engine on several devices."""


def engine_strategy(engine: str | Engine, base: type = SingleDeviceStrategy, **options: Any) -> Any:
    """Return a strategy that is a ``base`` and trains with an engine.

    Args:
        engine: an engine's name, or an engine.
        base: any strategy class of Lightning or Fabric, or one built on theirs (Ray's ``RayDDPStrategy``).
        **options: ``chains``, the engine's options if it is given by name, and those of ``base``.

    Raises:
        TypeError: ``base`` is no strategy class, or an option that neither has.
    """
    return with_engine(base)(engine, **options)


def __getattr__(name: str) -> Any:
    if name == "LanguageModel":
        raise AttributeError("gradfree.lightning.LanguageModel is gone: a LightningModule of your own takes ten lines.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_engines()
LayerParallelStrategy.register_strategies(StrategyRegistry)

__all__ = [
    "Classifier",
    "EngineDDPStrategy",
    "EngineFigures",
    "EngineStrategy",
    "GradientFidelity",
    "LayerParallelStrategy",
    "RandomStates",
    "ResumableLoader",
    "WatchGradient",
    "engine_strategy",
]
