"""Gradient engines for PyTorch: change one line to train an existing model with another gradient algorithm."""

from importlib import import_module
from types import ModuleType

from gradfree import checkout
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.handle import Handle
from gradfree.chains.kinds import register_chain
from gradfree.chains.report import Report
from gradfree.chains.solving import engine_figures
from gradfree.choosing.watching import GradientWatch
from gradfree.depth.ports import Port, register_port
from gradfree.engines.engine import Engine
from gradfree.engines.sweeps import SweepEngine
from gradfree.errors import ChainError
from gradfree.fidelity import Fidelity, gradient_fidelity
from gradfree.layers.roles import register_layer
from gradfree.optimizer import EngineOptimizer
from gradfree.orthogonal.weights import orthogonalize
from gradfree.ranks.stage import Stage, layer_parallel
from gradfree.registry import create_engine, create_model, list_engines, list_models, register_engine
from gradfree.resets.with_resets import run_with_resets
from gradfree.scans.scan import scan
from gradfree.time.cell_layer import CellLayer, ElementwiseCell

if checkout.IS_CHECKOUT:
    # The subpackages of this checkout, even if another version is installed.
    __path__.append(str(checkout.ROOT))


def __getattr__(name: str) -> ModuleType:
    """Import the subpackages when they are first used: ``gradfree.algorithms.HighwayBP``."""
    if name in ("algorithms", "models", "benchmarks", "huggingface", "lightning"):
        return import_module(f"gradfree.{name}")
    raise AttributeError(f"module 'gradfree' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, "__version__", "algorithms", "benchmarks", "huggingface", "lightning", "models"]


__version__ = "1.0.0rc1"
__all__ = [
    "CellLayer",
    "Chain",
    "ChainError",
    "ChainGradients",
    "ElementwiseCell",
    "Engine",
    "EngineOptimizer",
    "Fidelity",
    "GradientWatch",
    "Handle",
    "Port",
    "Report",
    "Stage",
    "SweepEngine",
    "create_engine",
    "create_model",
    "engine_figures",
    "gradient_fidelity",
    "layer_parallel",
    "list_engines",
    "list_models",
    "orthogonalize",
    "register_chain",
    "register_engine",
    "register_layer",
    "register_port",
    "run_with_resets",
    "scan",
]
