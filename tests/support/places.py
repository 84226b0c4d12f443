"""Where things lie in a checkout."""

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
