"""Without one of torch's private functions, or with a changed one, gradients are exact or an error names it."""

import subprocess
import sys
from pathlib import Path

import pytest

from gradfree.torchside.private import NAMES

SCRIPT = Path(__file__).with_name("without_private.py")
CASES = ("blocks", "checkpoints", "a row", "GRU", "a cell", "layers")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("changed", [False, True], ids=["absent", "with other arguments"])
def test_a_step_without_one_private_function_is_exact_or_raises(changed):
    """There is a result for each name and case; a missing one means that its process has crashed."""
    names = ["changed"] * changed + [*NAMES]
    done = subprocess.run([sys.executable, SCRIPT, *names], capture_output=True, text=True, timeout=600)
    rows = [row.split("\x1f") for row in done.stdout.split("\x1e") if row.strip()]
    found = {(name.strip(), case): result for name, case, result in rows}
    for name in NAMES:
        for case in CASES:
            result = found.get((name, case), done.stderr)
            assert result == "exact" or (result.startswith("refused") and name in result), (name, case, result)
        if not NAMES[name].startswith("backward passes raise"):
            assert {found[name, case] for case in CASES} == {"exact"}
