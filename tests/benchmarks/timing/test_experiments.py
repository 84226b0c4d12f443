"""Every experiment on small subjects: all rows are timed, reports are made, and all rows compute the same."""

import json
from dataclasses import replace
from timeit import timeit

import pytest
import torch
from report_records import section_of

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import attempt
from gradfree.benchmarks.reports.drawing import spec, styles
from gradfree.benchmarks.reports.report import texts
from gradfree.benchmarks.suites.depth import mlp
from gradfree.benchmarks.suites.rows import BACKPROP, iterated
from gradfree.benchmarks.timing.nets import (
    EACH,
    SEGMENTS,
    Checkpointed,
    Network,
    RecurrentNet,
    build_trainee,
    deep_steps,
    memory_steps,
    recurrent_steps,
    step_costs,
)
from gradfree.benchmarks.timing.recurrent_layers import Chunked, LayerPass, RecurrentLayer, layers, long_layers
from gradfree.benchmarks.timing.side_by_side import interleaved
from gradfree.benchmarks.timing.timed import Timings

ENGINE, SHOOTING = Row("backprop", "backprop", {}), Row("shooting", "shooting", {})
ENGINES = (ENGINE, *iterated("highway_bp", 1))
FOTON = Row("foton", "foton", {"orthogonalize_every": 4})
AGAIN = tuple(Checkpointed(f"backprop, {kept}", "backprop", {"plain": True}, kept) for kept in (EACH, SEGMENTS))
GRU = RecurrentLayer("GRU", 2, 6, 3)
NET = RecurrentNet("recurrent_lm", {"vocab_size": 5, "cell": "gru", "layers": 1, "width": 4}, 2, (6,), 5, "GRU")
PARTS = {
    "layers": Timings(layers, (GRU, RecurrentLayer("RNN", 2, 6, 3)), ENGINES, threads=1),
    "long layers": Timings(long_layers, (replace(GRU, batch_first=False),), (ENGINE, SHOOTING), 1),
    "models": Timings(recurrent_steps, (NET,), ENGINES, threads=1),
    "step costs": Timings(step_costs, (Network(3, 16, 8),), (BACKPROP, FOTON), threads=1),
    "memory": Timings(memory_steps, tuple(Network(d, 8, 64) for d in (3, 6)), (BACKPROP, *AGAIN, FOTON), threads=1),
    "deep nets": Timings(deep_steps, (mlp(4, 8, 2), mlp(3, 8, 2)), ENGINES[1:], 1),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Use float32, run each step once a round, no more rounds than declared, and skip what is slow.

    That is compiling, and processes for peaks of memory.
    """
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr("gradfree.benchmarks.timing.timed.mean_seconds", lambda step, _: timeit(step, number=1))
    monkeypatch.setattr("gradfree.benchmarks.timing.timed.interleaved", lambda turns, n, _: interleaved(turns, n, 1))
    monkeypatch.setattr("gradfree.benchmarks.timing.timed.process_peak", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda module: module)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_every_row_is_timed_and_has_a_verdict(part):
    cases = list(part.timing("cpu"))
    records = {case.id: json.loads(json.dumps(attempt(case))) for case in cases}
    assert not [record["error"] for record in records.values() if "error" in record]
    for case, record in zip(cases, records.values(), strict=True):
        labels = [row["label"] for row in record["results"]["rows"]]
        assert labels == list(part.timed.steps(case))
        for row in record["results"]["rows"]:
            assert len(row["times"]) == part.timed.rounds
            assert ("peak_memory" in row) is part.timed.with_memory
    section = section_of(part, records)
    assert len(section.verdicts) == len(section.rows) > 0
    assert "the baseline" in section.verdicts or part.timed.across == "row"
    assert len([cell for row in texts(section) for cell in row if cell != "–"]) > len(section.rows) * len(section.names)
    for chart in section.charts:
        spec(chart, styles([chart]))


def case_of(part):
    return next(iter(part.timing("cpu")))


@pytest.mark.parametrize(("cell", "batch_first"), [("GRU", True), ("GRU", False), ("LSTM", True), ("RNN", True)])
def test_loops_and_engines_have_the_gradients_of_the_plain_layer(cell, batch_first):
    torch.set_default_dtype(torch.float64)
    item = replace(GRU, cell=cell, dtype="float64", batch_first=batch_first)
    case = case_of(replace(PARTS["layers"], subjects=(item,), rows=(ENGINE,)))
    found = {}
    for label, build in case.timed.steps(case).items():
        step = build()
        step.run().backward(step.cotangent)
        found[label] = torch.cat([step.x.grad.flatten(), *(p.grad.norm()[None] for p in step.module.parameters())])
    plain = found.pop("plain")
    assert len(found) >= 2
    for gradient in found.values():
        torch.testing.assert_close(gradient, plain)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_chunked_layer_has_the_outputs_and_gradients_of_the_whole_layer(monkeypatch, batch_first):
    monkeypatch.setattr(Chunked, "max_steps", 4)
    case = case_of(replace(PARTS["long layers"], subjects=(replace(GRU, dtype="float64", batch_first=batch_first),)))
    whole, pieces = LayerPass(case), LayerPass(case, loop=Chunked)
    for one in (whole, pieces):
        one.run().backward(one.cotangent)
    torch.testing.assert_close(pieces.run(), whole.run())
    torch.testing.assert_close(pieces.x.grad, whole.x.grad)


@pytest.mark.parametrize("row", AGAIN, ids=lambda row: row.kept)
def test_checkpoints_do_not_change_gradients(row):
    network = Network(9, 8, 64)
    case = case_of(replace(PARTS["memory"], subjects=(network,)))
    again, plain = case.timed.steps(case)[row.label]().trainee, build_trainee(network, BACKPROP, "cpu", 0)
    for one in (again, plain):
        one.passes()
    for own, exact in zip(again.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, exact.grad)
