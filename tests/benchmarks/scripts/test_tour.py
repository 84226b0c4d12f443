"""The tour of one step lists the files that a step enters."""

import os
import subprocess
import sys

import tour
from places import ROOT


def test_the_tour_is_up_to_date_and_short():
    """In a process of its own: a tracer here would see the tests' settings of torch, too."""
    script = ROOT / "benchmarks" / "scripts" / "tour.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    blocks, layer, function = (table.count("\n| ") - 1 for table in tour.tables(tour.PAGE.read_text(encoding="utf-8")))
    # A step that runs through more files has hops, which a reader follows in vain.
    assert blocks <= 20
    assert layer <= 22
    assert function <= 24
