"""Engines as strategies of Lightning's Trainer; importing this registers every engine by its name.

After ``import gradfree.lightning``: ``Trainer(strategy="highway_bp")``, on several devices
``Trainer(strategy="highway_bp_ddp", devices=2)``, with options
``Trainer(strategy=gradfree.lightning.EngineStrategy("highway_bp", iterations=4))``.
"""

from typing import Any

from gradfree.engines.engine import Engine
from gradfree.extras import needs_extra

with needs_extra("lightning"):
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry

    from gradfree.lightning.callbacks import EngineFigures, GradientFidelity
    from gradfree.lightning.layer_parallel import LayerParallelStrategy
    from gradfree.lightning.strategies import register_engines, with_engine

EngineStrategy = with_engine(SingleDeviceStrategy)
"""Trains with an engine on one device, chosen by the Trainer."""

EngineDDPStrategy = with_engine(DDPStrategy)
"""Trains with an engine on several devices by DDP."""


def engine_strategy(engine: str | Engine, base: type = SingleDeviceStrategy, **options: Any) -> Any:
    """Return a strategy of a subclass of ``base`` that trains with an engine.

    Args:
        engine: an engine's name, or an engine.
        base: any strategy class of Lightning's Trainer, also of ``pytorch_lightning``, or a class derived from one.
        **options: ``chains``, the engine's options if it is given by name, and those of ``base``.

    Raises:
        TypeError: ``base`` is not a strategy class, or an option is unknown to both.
    """
    return with_engine(base)(engine, **options)


register_engines()
if "layer_parallel" not in StrategyRegistry:
    StrategyRegistry.register("layer_parallel", LayerParallelStrategy, "gradfree's highway_bp, blocks on each device")

__all__ = [
    "EngineDDPStrategy",
    "EngineFigures",
    "EngineStrategy",
    "GradientFidelity",
    "LayerParallelStrategy",
    "engine_strategy",
]
