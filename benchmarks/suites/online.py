"""The suite of online rules on two tasks that need memory."""

from __future__ import annotations

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import BACKPROP, TRUNCATED
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tasks.catalogue import DELAYED_RECALL, EVIDENCE
from gradfree.benchmarks.training.comparison import Comparison

_RULES = tuple(Row(name, name, {}) for name in ("rtrl", "snap", "eprop", "uoro"))
_RATES = (3e-3, 1e-2, 3e-2, 1e-1)

ONLINE: Suite = tuple(Comparison(task, (BACKPROP, *_RULES, TRUNCATED), _RATES) for task in (EVIDENCE, DELAYED_RECALL))
