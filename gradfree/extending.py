"""Everything that engines, kinds of chains, ports and forward passes of other packages import.

These names keep their meaning from one release to the next; other modules may change. ``docs/reference/api.md`` lists
them.
"""

from gradfree.algebra.cotangents import Cotangent, Factor, reverse_scan
from gradfree.algebra.time_scan import scan as time_scan
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.kinds import register_chain
from gradfree.chains.lesson import Lesson
from gradfree.chains.memory import Memory, running_mean
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.depth.depth_chain import DepthChain
from gradfree.depth.depth_site import Blocks
from gradfree.depth.ports import Port, register_port
from gradfree.engines.draws import new_generator
from gradfree.engines.engine import Engine
from gradfree.engines.layered import LayerEngine
from gradfree.engines.online import DenseInfluences, InfluenceEngine, StreamEngine, UnitEngine
from gradfree.engines.options import check_count, check_number, check_positive
from gradfree.engines.rank_segment import Neighbors
from gradfree.engines.sweeps import IteratedEngine, SweepEngine
from gradfree.engines.to_tolerance import ToleranceEngine
from gradfree.errors import ChainError
from gradfree.feedback.random_feedback import FeedbackEngine, RandomEngine
from gradfree.layers.layer_chain import LayerChain
from gradfree.layers.roles import Role, adjoint, linear_part, register_layer, role_of, weight_of
from gradfree.loops.recurrence import Loop, Runner
from gradfree.time.forward import Forward, Recurrence, Trajectory
from gradfree.time.time_chain import TimeChain
from gradfree.torchside.optimizer_steps import AfterStep

__all__ = [
    "AfterStep",
    "Attachment",
    "Blocks",
    "Chain",
    "ChainError",
    "ChainGradients",
    "Cotangent",
    "DenseInfluences",
    "DepthChain",
    "Engine",
    "Factor",
    "FeedbackEngine",
    "Forward",
    "InfluenceEngine",
    "IteratedEngine",
    "LayerChain",
    "LayerEngine",
    "Lesson",
    "Loop",
    "Memory",
    "Neighbors",
    "Port",
    "RandomEngine",
    "Recurrence",
    "Removable",
    "Role",
    "Runner",
    "Site",
    "StreamEngine",
    "SweepEngine",
    "TimeChain",
    "ToleranceEngine",
    "Trajectory",
    "UnitEngine",
    "adjoint",
    "check_count",
    "check_number",
    "check_positive",
    "linear_part",
    "new_generator",
    "register_chain",
    "register_layer",
    "register_port",
    "reverse_scan",
    "role_of",
    "running_mean",
    "time_scan",
    "weight_of",
]
