"""Engines as Lightning strategies; importing this registers every engine under its name.

``Trainer(strategy="highway_bp")`` after ``import gradfree.lightning``, or
``Trainer(strategy=gradfree.lightning.EngineStrategy("highway_bp", iterations=4))`` with options.
"""

from gradfree.lightning.strategy import EngineStrategy, register_engines

register_engines()

__all__ = ["EngineStrategy"]
