"""The suites of ``gradfree bench run``, by name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites import forward_only
from gradfree.benchmarks.suites.alternatives import ALTERNATIVES
from gradfree.benchmarks.suites.cells import CELLS, NARROW
from gradfree.benchmarks.suites.depth import DEPTH_MAP, DEPTH_TRAINING, GPU_DEPTH, RESIDUAL_QUICK
from gradfree.benchmarks.suites.long_sequences import (
    EVALUATION,
    GPU_TIME,
    LONG_SEQUENCES,
    PRECISION,
    PYDOC_LONG,
    SEPARATE_UNITS,
    SHOOTING,
)
from gradfree.benchmarks.suites.online import ONLINE
from gradfree.benchmarks.suites.packed import PACKED
from gradfree.benchmarks.suites.papers import DSF_WIKITEXT_SMALL, FOTON_DEPTH_SMALL, HIGHWAY_BP_TABLE6_SMALL
from gradfree.benchmarks.suites.rows import BACKPROP, DSF, DSF_GATE, TRUNCATED, iterated
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tasks import catalogue
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.conditions import CONDITIONS, conditions
from gradfree.benchmarks.timing.recurrent_layers import RecurrentLayer, layers
from gradfree.benchmarks.timing.timed import Timings
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.wording import spelled

_BACKPROP = (BACKPROP, Row("backprop via chain", "backprop", {}))
_highway = partial(iterated, "highway_bp")
_DSF = (DSF, DSF_GATE)
_RECURRENT = (
    *_BACKPROP,
    TRUNCATED,
    *_DSF,
    *iterated("fixed_point", 1),
    *_highway(0, 1, 2),
)
_SIZES = ((1, 4096, 64), (8, 1024, 64), (8, 1024, 256), (32, 256, 256))
_LENGTHS = (64, 256, 4096)
_GRUS = (
    *(RecurrentLayer("GRU", *size) for size in _SIZES),
    *(RecurrentLayer("GRU", 8, steps, 64) for steps in _LENGTHS),
)
_LAYERS = (
    *_GRUS,
    *(RecurrentLayer(cell, *size) for cell in ("LSTM", "RNN") for size in (_SIZES[0], _SIZES[2])),
)
_LAYER_ROWS = (
    Row("backprop", "backprop", {}),
    TRUNCATED,
    Row("dsf", "dsf", {"feedback": "linspace"}),
    *_highway(0, 2),
)
_SYNTHETIC = (BACKPROP, TRUNCATED, *_DSF, *_highway(0, 2))
_SWEPT = _BACKPROP + iterated("fixed_point", 1, 2, 4)
_SWEPT_GATED = _SWEPT + _highway(0, 1, 2, 4)


def _pydoc(cell: str) -> Task:
    """Return a task just long enough to show how gradients converge with k."""
    options = {**catalogue.PYDOC_GRU.options, "cell": cell}
    # Validation perplexity with backprop at 1e-2, 2e-2, 4e-2, two seeds each: GRU 4.26, 4.21, 4.45; LSTM 4.78, 4.43,
    # 4.40; RNN 4.61, 4.44, 4.68.
    return replace(catalogue.PYDOC_GRU, name=f"pydoc_{cell}", options=options, steps=300, learning_rate=2e-2)


# γ = 0 everywhere. The paper uses 0.2 for pre-LN transformers, but on pydoc's validation data 0 was no worse:
# perplexity 11.7, 10.4, 10.5, 10.8 at k = 0, 1, 2, 4 against 12.0, 10.8, 10.5, 10.9, means over three other seeds.
SUITES: dict[str, Suite] = {
    # One model of each family, in less than two minutes on two cores; each step takes long enough to be timed.
    "quick": (RESIDUAL_QUICK, Comparison(replace(PYDOC_LONG, evaluations=0), (BACKPROP, SHOOTING)), forward_only.QUICK),
    "rnn": (
        Timings(layers, _LAYERS, _LAYER_ROWS, threads=2),
        Comparison(catalogue.PYDOC_GRU, _RECURRENT),
        Comparison(_pydoc("gru"), _SWEPT_GATED),
        Comparison(_pydoc("lstm"), _SWEPT_GATED),
        Comparison(_pydoc("rnn"), _SWEPT),
        Comparison(catalogue.COPYING, _SYNTHETIC),
        Comparison(catalogue.ADDING, _SYNTHETIC),
        Comparison(catalogue.PARITY, _SYNTHETIC),
    ),
    "text": (
        Comparison(catalogue.TINYSHAKESPEARE, _RECURRENT, learning_rates=(5e-3, 1e-2, 2e-2)),
        Comparison(catalogue.WIKITEXT2, _RECURRENT, learning_rates=(5e-3, 1e-2, 2e-2, 4e-2)),
    ),
    "conditions": (Timings(conditions, CONDITIONS, (SHOOTING,), threads=1),),
    "long-sequences": LONG_SEQUENCES,
    "evaluation": EVALUATION,
    "packed": PACKED,
    "cells": CELLS,
    "online": ONLINE,
    "narrow": NARROW,
    "separate-units": SEPARATE_UNITS,
    "precision": PRECISION,
    "gpu-time": GPU_TIME,
    "depth-map": DEPTH_MAP,
    "depth-training": DEPTH_TRAINING,
    "gpu-depth": GPU_DEPTH,
    "alternatives": ALTERNATIVES,
    "forward-only": forward_only.FORWARD_ONLY,
    "forward-memory": forward_only.FORWARD_MEMORY,
    "orthogonal-layers": forward_only.ORTHOGONAL_LAYERS,
    "temperature": forward_only.TEMPERATURE,
    "highway-bp-table6-small": HIGHWAY_BP_TABLE6_SMALL,
    "dsf-wikitext-small": DSF_WIKITEXT_SMALL,
    "foton-depth-small": FOTON_DEPTH_SMALL,
}


def suite_name(given: str | None) -> str:
    """Return the name of the suite that ``given`` asks for, with ``-`` or ``_``; by default "quick"."""
    return spelled(given or "quick", SUITES)
