"""Every number that chooses between methods is measured again by ``benchmarks/scripts/costs.py``."""

import ast
from dataclasses import fields
from math import isfinite
from pathlib import Path

import pytest
import torch
from costs import MEASURES, in_code

from gradfree.benchmarks.timing.crossovers import Bench, crossover
from gradfree.devices import costs

# What is no cost: the value of no bound, and steps of the model of costs.
STRUCTURAL = {0, 1, 2, 3, 0.1, 4, 8, 16, 64, 1024}


def test_each_number_of_the_costs_is_measured():
    constants = {
        name
        for name, value in vars(costs).items()
        if name.isupper() and isinstance(value, int | float) and name[0] != "_"
    }
    assert {field.name for field in fields(costs.Costs)} | constants - {"UNLIMITED"} == MEASURES.keys()


def test_no_rule_of_costs_contains_a_number():
    tree = ast.parse(Path(costs.__file__).read_text(encoding="utf-8"))
    rules = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    numbers = {
        node.value
        for rule in rules
        for node in ast.walk(rule)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float)
    }
    assert len(rules) > 10
    assert numbers <= STRUCTURAL, (
        "give the number a name in the table Costs, and measure it in benchmarks/scripts/costs.py"
    )


def test_a_bound_is_where_two_methods_take_the_same_time():
    assert crossover([1, 4, 16, 64], lambda size: size / 8) == pytest.approx(8)
    assert crossover([1, 4], lambda size: 0.5) == 4
    assert crossover([2, 4], lambda size: 3.0) == 2


def in_steady_seconds(bench, *runs):
    """Run each once, and return times through which a line has a start above zero, as on an idle machine."""
    for run in runs:
        run()
    return [1.0 + n for n in range(len(runs))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MEASURES)
def test_each_measurement_runs(name, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(Bench, "times", in_steady_seconds)
    bench = Bench(torch.device("cpu"), seconds=0.0, small=True)
    tables = dict(costs.TABLES)
    assert isfinite(MEASURES[name](bench))
    assert isfinite(in_code(name, bench.device))
    assert tables == costs.TABLES
