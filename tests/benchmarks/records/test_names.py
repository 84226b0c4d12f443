"""Records keep their ids: names in records do not depend on the files of functions and classes."""

import hashlib
import re
from dataclasses import dataclass, fields, replace

import pytest
import torch
from tiny_suite import TASK, points, training

from gradfree.benchmarks.records.names import recorded_name
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.tasks.imported import Imported
from gradfree.benchmarks.tasks.loaded import Loaded, squared_error
from gradfree.benchmarks.tasks.metrics import LossMetric, accuracy
from gradfree.benchmarks.tasks.task import Score, Task, cross_entropy

_WRITTEN = {
    "rnn": "c9efe26dce4edb12",
    "text": "5addab981d02f63b",
    "forward-only": "4c86f756ac6829b3",
    "highway-bp-table6-small": "7dae86d27f58ebb9",
    "dsf-wikitext-small": "d0fcd6405143a61b",
    "foton-depth-small": "48370463c7569468",
}
"""Digests of the ids of all cases of each suite, as version 0.1 wrote them. Since then, ``rnn`` and ``forward-only``
have lost cases, the steps of ``forward-only`` have gained a row, that suite and the papers' have gained learning rates,
engines without a temperature have the option 1, and rows on orthogonal layers name the options that
``orthogonal_backprop`` had by default.
"""


@pytest.mark.parametrize(("suite", "digest"), _WRITTEN.items(), ids=_WRITTEN)
def test_ids_equal_those_of_version_0_1(suite, digest):
    """With other ids, users' suites would run again, and committed records would not be shown."""
    names = [
        case.id
        for device in ("cpu", "cuda")
        for part in SUITES[suite]
        for cases in (part.trials(device), part.timing(device), part.training(0, device, {}))
        for case in cases
        if case is not None
    ]
    assert hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16] == digest


def test_the_id_of_a_users_model_equals_that_of_version_0_1():
    given = {"name": "my:build", "model": "my:build", "options": {}, "learning_rate": 1e-3, "batch_size": 32}
    own = {"data": Loaded(Imported("my:loader", "0123abcd")), "builder": Imported("my:build", "4567cdef"), "steps": 200}
    of_numbers = Task(
        **given, **own, loss=squared_error, score=Score("loss", "mean", LossMetric(squared_error)), chains=("blocks",)
    )
    of_classes = Task(**given, **own, loss=cross_entropy, score=Score("accuracy", "%", accuracy, 100.0))
    assert training(task=of_numbers).id.endswith("/da60863e")
    assert training(task=of_classes).id.endswith("/161e44e3")


def test_classes_with_equal_fields_have_different_ids():
    @dataclass(frozen=True)
    class OtherTask(type(TASK)):
        pass

    other = OtherTask(**{f.name: getattr(TASK, f.name) for f in fields(TASK)})
    assert training(task=other).config["task"].pop("class").partition(" ")[0].endswith("OtherTask")
    assert training(task=other).id != training().id


def test_a_users_function_is_recorded_with_module_and_digest():
    assert re.fullmatch("tiny_suite.points @[0-9a-f]{8}", recorded_name(points))
    assert recorded_name(torch.nn.functional.mse_loss) == "torch.nn.functional.mse_loss"
    assert training(task=replace(TASK, loss=cross_entropy)).config["task"]["loss"] == (
        "gradfree.benchmarks.tasks.cross_entropy"
    )
