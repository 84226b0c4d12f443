"""The alignment of cotangents and feedback weights is recorded, and shown by depth and by step."""

from dataclasses import replace

import pytest
import torch
from report_records import chart, lines, markdown, section_of, table_rows
from tiny_suite import HIGHWAY, PLAIN, TASK, fake, training
from torch import nn

from gradfree import gradient_fidelity
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.fidelity import loss_fidelity

FA = Row("fa", "fa", {"feedback": "frsf"})
ROWS = Comparison(TASK, (PLAIN, HIGHWAY, FA))


def test_training_records_the_cosines_of_the_blocks_cotangents():
    (first, *_), deepest = training(HIGHWAY).run()["fidelity"], 1.0
    depths, cosines, ratios = zip(*first["states"], strict=True)
    assert list(depths) == sorted(depths)
    assert 0 < depths[0] < depths[-1] < deepest
    assert cosines[-1] == ratios[-1] == 1
    assert 0 < cosines[0] < 1
    assert "feedback" not in first


class Recurrent(nn.Module):
    """A GRU whose head has nearly all of the gradient."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(1, 3, batch_first=True), nn.Linear(3, 1)
        nn.init.constant_(self.head.weight, 1e-3)

    def forward(self, x):
        return self.head(self.rnn(x[..., None])[0].mean(1))


def test_recurrent_rows_show_the_cosine_of_the_chain_and_of_its_steps():
    engine, model, batch = Row("truncated", "truncated", {"window": 1}), Recurrent(), torch.randn(4, 6)
    targets = torch.ones(4, 1)
    found = gradient_fidelity(engine.create_engine(), model, nn.functional.mse_loss, (batch, targets))
    with engine.create_engine().attach(model) as handle:
        loss = nn.functional.mse_loss(model(batch), targets)
        own = training(engine).probe(loss_fidelity(loss, model, handle), handle)
    assert own["chain"] == pytest.approx(found.chains.cosine, abs=1e-6)
    assert own["chain"] < own["cosine"]
    ((_, cosine, ratio),) = own["steps"]
    assert [cosine, ratio] == pytest.approx(
        [found.states["rnn.l0"].cosine, found.states["rnn.l0"].norm_ratio], abs=1e-4
    )

    results = {"losses": [], "validation": 90, "test": 90, "fidelity": [{"step": 0, **own}]}
    records = dict([fake(training(PLAIN), results | {"fidelity": [{"step": 0, "cosine": 1.0, "chain": 1.0}]})])
    records |= dict([fake(training(HIGHWAY), results)])
    section = section_of(Comparison(TASK, (PLAIN, HIGHWAY)), records)
    (row,) = [row for row in table_rows(markdown(section)) if row[0] == HIGHWAY.label]
    assert row[-3:] == [f"{own['chain']:.3f}", f"{cosine:.3f}", f"{ratio:.3g}"]
    assert [column.heading for column in section.columns][-3:] == ["cosine of the chains", "δ cosine", "δ norm ratio"]
    assert not [one for one in section.charts if "by depth" in one.title]


def probe(step, *cosines):
    states = [(0.25 * n, cosine, 2 * cosine) for n, cosine in enumerate((*cosines, 1.0), 1)]
    return {"step": step, "cosine": 0.5, "relative_error": 0.5, "states": states}


def test_alignment_excludes_the_last_block_and_is_drawn_by_depth_and_by_step():
    probes = {0: [probe(0, 0.1, 0.3), probe(9, 0.5, 0.7)], 1: [probe(0, 0.3, 0.5), probe(9, 0.7, 0.9)]}
    results = {"losses": [], "validation": 90, "test": 90}
    records = dict(
        fake(training(HIGHWAY, seed=seed), {**results, "fidelity": fidelity}) for seed, fidelity in probes.items()
    )
    plain = {**results, "fidelity": [{"step": 0, "cosine": 1.0, "relative_error": 0.0}]}
    records |= dict([fake(training(PLAIN), plain)])
    section = section_of(ROWS, records)
    (highway,) = [row for row in table_rows(markdown(section)) if row[0] == HIGHWAY.label]
    assert highway[-2:] == ["0.500", "1"]
    assert lines(chart(section, "alignment by depth, after the training")) == {
        HIGHWAY.label: [pytest.approx([0.25, 0.6]), pytest.approx([0.5, 0.8])]
    }
    assert lines(chart(section, "alignment over the training")) == {
        HIGHWAY.label: [pytest.approx([0, 0.3]), pytest.approx([9, 0.7])]
    }


def test_fixed_learning_rates_of_rows_have_no_trials():
    part = replace(ROWS, rates={HIGHWAY.label: 0.5})
    assert not list(part.trials("cpu"))
    rates = [case.task.learning_rate for case in part.training(0, "cpu", {})]
    assert rates == [TASK.learning_rate, 0.5, TASK.learning_rate]
    records = dict([fake(training(PLAIN), {"losses": [], "fidelity": [], "validation": 90, "test": 90})])
    assert ", weight_decay=0.01) at the row's rate, warmed up" in section_of(part, records).setup
