"""The engines, one file for each."""

from gradfree.algorithms.around.auto import Auto
from gradfree.algorithms.around.orthogonal_training import Orthogonal, OrthogonalBackprop
from gradfree.algorithms.backprop import Backprop
from gradfree.algorithms.dfa import DFA
from gradfree.algorithms.dsf import DSF
from gradfree.algorithms.fa import FA
from gradfree.algorithms.fixed_point import FixedPoint
from gradfree.algorithms.forward_gradient import ForwardGradient
from gradfree.algorithms.foton import FOTON, FOTONRule
from gradfree.algorithms.highway_bp import HighwayBP
from gradfree.algorithms.parallel.deeppcr import DeepPCR
from gradfree.algorithms.parallel.newton import Newton
from gradfree.algorithms.parallel.shooting import Shooting
from gradfree.algorithms.pepita import PEPITA
from gradfree.algorithms.predictive_coding import PredictiveCoding
from gradfree.algorithms.truncated import Truncated

__all__ = [
    "DFA",
    "DSF",
    "FA",
    "FOTON",
    "PEPITA",
    "Auto",
    "Backprop",
    "DeepPCR",
    "FOTONRule",
    "FixedPoint",
    "ForwardGradient",
    "HighwayBP",
    "Newton",
    "Orthogonal",
    "OrthogonalBackprop",
    "PredictiveCoding",
    "Shooting",
    "Truncated",
]
