"""The suites that may have committed records, by the names of their folders."""

from gradfree.benchmarks.advice import regret
from gradfree.benchmarks.suites.index import SUITES

PUBLISHED = SUITES | {"advice": regret.suite()}
