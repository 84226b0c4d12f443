"""Cases with the user's model and data run again if and only if code or data change."""

import os
import random
import sys

import numpy as np
import pytest
import torch
from tiny_suite import PLAIN, fake, training

from gradfree.benchmarks.records.names import source_digest
from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.sweeps.axes import Sweep
from gradfree.benchmarks.sweeps.sweep import suite_of
from gradfree.benchmarks.tables.experiment import cases
from gradfree.benchmarks.tasks.loaded import _load, own_task
from gradfree.cli import main

FILES = {
    "theirs.py": """
import random
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from parts import make
from parts.deep.inner import SCALE

def build():
    from lazy.sub import late
    return make(SCALE)

def read():
    table = torch.from_numpy(np.loadtxt("table.csv", delimiter=",", dtype="float32"))
    return SCALE * table[:, :2], table[:, 2:]

def shuffled():
    return DataLoader(TensorDataset(*read()), batch_size=7, shuffle=True)

def typed():
    x, y = read()
    return x.bfloat16(), y > 1

def augmented():
    x, y = read()
    return x + torch.randn_like(x) + random.random() + np.random.rand(), y
""",
    "parts/__init__.py": "from .blocks import make\n",
    "parts/blocks.py": """
from torch import nn

class Block(nn.Linear):
    def forward(self, x):
        return x + super().forward(x)

def make(scale):
    return nn.Sequential(nn.Sequential(Block(2, 2), Block(2, 2)), nn.Linear(2, 1))
""",
    "parts/deep/__init__.py": "",
    "parts/deep/inner.py": "from ..numbers import ONE as SCALE\n",
    "parts/numbers.py": "ONE = 1\n",
    "lazy/sub/late.py": "",
    "unrelated.py": "",
    "table.csv": "".join(f"{n},{n * n % 7},{n % 3}\n" for n in range(40)),
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("theirs", "parts", "lazy")]:
        del sys.modules[name]


def ids_of(*loaders):
    """Return the id of a case on the data of each loader, as a new process finds it."""
    _load.cache_clear()
    for seed in (random.seed, np.random.seed, torch.seed):
        seed()
    return [training(PLAIN, task=own_task("theirs:build", {}, f"theirs:{name}", None, None)).id for name in loaders]


def edit(file, text):
    """Append ``text`` to ``file`` and restore its times."""
    times = file.stat()
    file.write_text(file.read_text() + text)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_changed_examples_give_other_case_ids(folder, monkeypatch):
    """Rewritten, shuffled or augmented data keep their ids: otherwise no run would find its records."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    loaders = "read", "shuffled", "typed", "augmented"
    before = ids_of(*loaders)
    (folder / "table.csv").touch()
    assert ids_of(*loaders) == before
    table = folder / "table.csv"
    table.write_text(table.read_text().replace("39,", "38,", 1))
    assert len({*before, *ids_of(*loaders)}) == 8


def digest(module):
    """Return the digest of the current files."""
    source_digest.cache_clear()
    return source_digest(module)


@pytest.mark.parametrize("file", ["parts/__init__.py", "parts/blocks.py", "parts/numbers.py", "lazy/sub/late.py"])
def test_a_changed_import_gives_another_digest(folder, file, monkeypatch):
    """For imports in a package, relative, indirect, in a function, and from folders without an __init__."""
    monkeypatch.syspath_prepend(folder)
    before = digest("theirs")
    for other in ("unrelated.py", "table.csv"):
        edit(folder / other, "0\n")
    os.utime(folder / file)
    assert digest("theirs") == before
    edit(folder / file, "# edited\n")
    assert digest("theirs") != before


OWN = """
from dataclasses import dataclass
import gradfree
from gradfree.algorithms import FixedPoint

@dataclass(frozen=True)
class Mine(FixedPoint):
    gain: int = 1
"""


def planned(folder, capsys, *options):
    """Return the output of a run with an engine from a file."""
    source_digest.cache_clear()
    given = ["--tasks", "digits", "--engines", "{own_engine:Mine: {gain: 2}, autograd: }", "--seeds", "1"]
    main(["bench", "run", *given, "--out", str(folder / "out"), *options])
    return capsys.readouterr().out


def test_cases_of_an_engine_by_import_path_run_again_when_its_file_changes(folder, monkeypatch, capsys):
    torch.set_default_dtype(torch.float32)
    (folder / "own_engine.py").write_text(OWN)
    monkeypatch.syspath_prepend(folder)
    _, *before = planned(folder, capsys, "--dry-run").splitlines()
    assert [line.split("/")[2] for line in before] == ["backprop", "own_engine:Mine gain=2", "all rows"]
    (suite,) = suite_of(Sweep(tasks="digits", engines={"own_engine:Mine": {"gain": 2}}))
    file = RecordFile(folder / "out" / "records.jsonl")
    file.path.parent.mkdir()
    for case in cases((suite,), 1, "cpu", {}):
        file.append(fake(case, {})[1])
    assert "3 of 3 cases are in" in planned(folder, capsys, "--dry-run")
    assert "again" not in planned(folder, capsys, "--dry-run", "--seeds", "2")
    edit(folder / "own_engine.py", "# a flipped sign\n")
    said = planned(folder, capsys, "--dry-run")
    assert "2 of 3 cases will run again" in said
    assert "2 of 3 cases would run" in said
