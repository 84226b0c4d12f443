"""Without one of torch's private functions, or with a changed one, gradients are exact or an error names it."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from gradfree.torchside.private import NAMES

SCRIPT = Path(__file__).with_name("without_private.py")
CASES = ("blocks", "checkpoints", "a row", "GRU", "a cell", "layers")


@pytest.mark.processes
@pytest.mark.slow
def test_a_step_without_one_private_function_is_exact_or_raises():
    """There is a result for each name, fault and case; a missing one means that its process has crashed."""
    done = subprocess.run([sys.executable, SCRIPT, *NAMES], capture_output=True, text=True, timeout=600)
    rows = [row.strip().split("\x1f") for row in done.stdout.split("\x1e") if row.strip()]
    found = {tuple(key): result for *key, result in rows}
    for name, fault in product(NAMES, ("absent", "with other arguments")):
        for case in CASES:
            result = found.get((name, fault, case), done.stderr)
            assert result == "exact" or (result.startswith("refused") and name in result), (name, fault, case, result)
        if not NAMES[name].startswith("backward passes raise"):
            assert {found[name, fault, case] for case in CASES} == {"exact"}
