"""Engines as strategies of Lightning's Trainer and of Fabric; importing this registers every engine by its name.

After ``import gradfree.lightning``: ``Trainer(strategy="highway_bp")``, on several devices
``Trainer(strategy="highway_bp_ddp", devices=2)``, with options
``Trainer(strategy=gradfree.lightning.EngineStrategy("highway_bp", iterations=4))``.
"""

from typing import Any

from gradfree.engines.engine import Engine
from gradfree.extras import needs_extra

with needs_extra("lightning"):
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

    from gradfree.lightning.callbacks import EngineFigures, GradientFidelity, WatchGradient
    from gradfree.lightning.engine_mixins import with_engine
    from gradfree.lightning.layer_parallel import LayerParallelStrategy
    from gradfree.lightning.modules import Classifier
    from gradfree.lightning.resuming import RandomStates, ResumableLoader
    from gradfree.lightning.strategies import register_engines

EngineStrategy = with_engine(SingleDeviceStrategy)
"""Trains with an engine on one device, chosen by the Trainer."""

EngineDDPStrategy = with_engine(DDPStrategy)
"""Trains with an engine on several devices by DDP."""


def engine_strategy(engine: str | Engine, base: type = SingleDeviceStrategy, **options: Any) -> Any:
    """Return a strategy of a subclass of ``base`` that trains with an engine.

    Args:
        engine: an engine's name, or an engine.
        base: any strategy class of Lightning or Fabric, or a class derived from one (Ray's ``RayDDPStrategy``).
        **options: ``chains``, the engine's options if it is given by name, and those of ``base``.

    Raises:
        TypeError: ``base`` is not a strategy class, or an option is unknown to both.
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
