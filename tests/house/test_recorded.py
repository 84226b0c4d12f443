"""``make gpu`` goes on where it stopped: a test on record is not run again, until what is tested is something else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci"


@pytest.mark.slow
def test_tests_on_record_are_not_run_again_until_the_sources_change(tmp_path):
    (tmp_path / "test_two.py").write_text("def test_right():\n    pass\n\n\ndef test_wrong():\n    raise ValueError\n")
    record = tmp_path / "record.jsonl"

    def run(of):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "recorded", "--record", str(record), "--record-of", of]
        environment = os.environ | {"PYTHONPATH": str(CI)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout

    assert "1 failed, 1 passed" in run("one")
    assert "2 deselected" in run("one")
    # What a killed process leaves half written does not count.
    *whole, last = record.read_text().splitlines(keepends=True)
    record.write_text("".join(whole) + last[:10])
    assert "1 failed, 1 deselected" in run("one")
    assert "1 failed, 1 passed" in run("another")
