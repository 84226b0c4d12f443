"""Without any one of torch's private functions gradients are exact, or an error says what is missing."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from gradfree.torchside.private import NAMES

SCRIPT = Path(__file__).with_name("without_private.py")
CASES = ("blocks", "a row", "GRU", "a cell", "layers")


@cache
def results():
    """Return what came of each name and case."""
    done = subprocess.run([sys.executable, SCRIPT, *NAMES], capture_output=True, text=True, timeout=300)
    rows = [row.split("\x1f") for row in done.stdout.split("\x1e") if row.strip()]
    return {(name.strip(), case): result for name, case, result in rows}, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_it_is_exact_or_refused(name):
    found, errors = results()
    for case in CASES:
        result = found.get((name, case), errors)
        assert result == "exact" or (result.startswith("refused") and name in result), (case, result)
    if not NAMES[name].startswith("backward passes raise"):
        assert {found[name, case] for case in CASES} == {"exact"}
