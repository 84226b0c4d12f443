"""Rules that run forward in time, beside backpropagation through time, where memory is needed."""

from __future__ import annotations

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import BACKPROP, TRUNCATED
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tasks.catalogue import DELAYED_RECALL, EVIDENCE
from gradfree.benchmarks.training.comparison import Comparison

_ROWS = (BACKPROP, *(Row(name, name, {}) for name in ("rtrl", "snap", "eprop", "uoro")), TRUNCATED)
_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)

ONLINE: Suite = (Comparison(DELAYED_RECALL, _ROWS, _RATES), Comparison(EVIDENCE, _ROWS, _RATES))
