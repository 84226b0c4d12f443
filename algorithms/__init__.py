"""The engines, one file for each."""

from gradfree.algorithms.auto import Auto
from gradfree.algorithms.backprop import Backprop
from gradfree.algorithms.deeppcr import DeepPCR
from gradfree.algorithms.dfa import DFA
from gradfree.algorithms.drtp import DRTP
from gradfree.algorithms.dsf import DSF
from gradfree.algorithms.eprop import EProp
from gradfree.algorithms.fa import FA
from gradfree.algorithms.fixed_point import FixedPoint
from gradfree.algorithms.forward_gradient import ForwardGradient
from gradfree.algorithms.foton import FOTON
from gradfree.algorithms.highway_bp import HighwayBP
from gradfree.algorithms.mezo import MeZO
from gradfree.algorithms.newton import Newton
from gradfree.algorithms.orthogonal_training import OrthogonalBackprop
from gradfree.algorithms.pepita import PEPITA
from gradfree.algorithms.predictive_coding import PredictiveCoding
from gradfree.algorithms.rtrl import RTRL
from gradfree.algorithms.shooting import Shooting
from gradfree.algorithms.snap import SnAp
from gradfree.algorithms.target_propagation import TargetPropagation
from gradfree.algorithms.truncated import Truncated
from gradfree.algorithms.uoro import UORO

__all__ = [
    "DFA",
    "DRTP",
    "DSF",
    "FA",
    "FOTON",
    "PEPITA",
    "RTRL",
    "UORO",
    "Auto",
    "Backprop",
    "DeepPCR",
    "EProp",
    "FixedPoint",
    "ForwardGradient",
    "HighwayBP",
    "MeZO",
    "Newton",
    "OrthogonalBackprop",
    "PredictiveCoding",
    "Shooting",
    "SnAp",
    "TargetPropagation",
    "Truncated",
]
