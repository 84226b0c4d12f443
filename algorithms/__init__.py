"""The engines, one file each."""

from gradfree.algorithms.backprop import Backprop
from gradfree.algorithms.dsf import DSF
from gradfree.algorithms.fixed_point import FixedPoint
from gradfree.algorithms.foton import FOTON
from gradfree.algorithms.highway_bp import HighwayBP
from gradfree.algorithms.truncated import Truncated

__all__ = ["DSF", "FOTON", "Backprop", "FixedPoint", "HighwayBP", "Truncated"]
