"""Without any one of torch's private functions gradients are exact, or an error says what is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from gradfree.torchside.private import NAMES

SCRIPT = Path(__file__).with_name("without_private.py")
CASES = ("blocks", "a row", "GRU", "a cell", "layers")


@pytest.mark.processes
@pytest.mark.slow
def test_a_step_without_any_one_of_them_is_exact_or_refused():
    """Of each name and case there is a result; what is missing has ended its process."""
    done = subprocess.run([sys.executable, SCRIPT, *NAMES], capture_output=True, text=True, timeout=600)
    rows = [row.split("\x1f") for row in done.stdout.split("\x1e") if row.strip()]
    found = {(name.strip(), case): result for name, case, result in rows}
    for name in NAMES:
        for case in CASES:
            result = found.get((name, case), done.stderr)
            assert result == "exact" or (result.startswith("refused") and name in result), (name, case, result)
        if not NAMES[name].startswith("backward passes raise"):
            assert {found[name, case] for case in CASES} == {"exact"}
