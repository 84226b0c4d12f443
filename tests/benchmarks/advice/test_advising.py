"""``gradfree advise`` on a user's model, from the command line."""

import json

import pytest

from gradfree.cli import main

MODEL, DATA = "user_module:build", "user_module:loader"


def ended(capsys, *args):
    """Exit code, output and error of a command that ends the process."""
    with pytest.raises(SystemExit) as end:
        main(args)
    return end.value.code, *capsys.readouterr()


@pytest.fixture
def uncompiled(monkeypatch):
    """Compiling takes longer than everything else, in a process that does not know of patches."""
    monkeypatch.setattr("gradfree.benchmarks.advice.advising.compiled_cost", lambda *_: "not compiled")


@pytest.mark.slow
def test_every_engine_is_told_of_and_those_that_work_are_measured(capsys, tmp_path, uncompiled):
    main(["advise", MODEL, "--budget", "20s", "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "backprop:\n  note: nothing is attached" in out
    assert "dfa, fa, foton, orthogonal_backprop, pepita:\n  problem: the model has no chain" in out
    found = json.loads((tmp_path / "advice.json").read_text())["results"]
    told = {row["label"]: row for row in found["rows"]}
    labels = {*told, *found["untried"], *found["failures"]}
    assert {"backprop", "highway_bp k=0", "fixed_point k=4", "truncated window=8", "dsf feedback=gate"} <= labels
    assert not found["failures"]
    assert found["advice"] in " ".join((tmp_path / "report.md").read_text().split())
    assert told["backprop"]["ratio"] == 1.0
    exact = [row for row in told.values() if row["label"] in ("highway_bp k=4", "deeppcr") and row["cosine"]]
    assert all(row["cosine"] > 1 - 1e-6 for row in exact)


def test_without_data_nothing_is_measured(capsys, tmp_path, monkeypatch):
    (tmp_path / "lone_module.py").write_text("from user_module import Model\ndef build():\n    return Model(2, 3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    main(["check", "lone_module:build"])
    out = capsys.readouterr().out
    assert "chain 'blocks': 2 blocks" in out
    assert "Nothing is measured without data: --data module:function" in out


def test_chains_are_separated_by_commas(capsys, tmp_path, monkeypatch):
    (tmp_path / "two_chains.py").write_text(
        "from torch import nn\n"
        "def chain():\n    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))\n"
        "def build():\n    return nn.ModuleDict({'x': chain(), 'y': chain()})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    main(["advise", "two_chains:build", "--chains", "x,y"])
    out = capsys.readouterr().out
    assert "chain 'x': 2 blocks" in out
    assert "chain 'y': 2 blocks" in out


@pytest.mark.slow
def test_that_every_engine_fails_in_its_first_step_is_an_error(capsys, tmp_path, monkeypatch):
    """Each says why, and so does the dry run: nothing is recommended that was never on the model."""
    (tmp_path / "kept_inside.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.inner = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n        self.kept = torch.tanh(self.inner(x))\n        return x + self.kept\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.blocks = nn.Sequential(*[Block() for _ in range(3)])\n"
        "    def forward(self, x):\n"
        "        out = self.blocks(x).sum()\n"
        "        return {'loss': out + sum(b.kept.pow(2).sum() for b in self.blocks)}\n"
        "def build():\n    return Net()\n"
        "def loader():\n    return [{'x': torch.randn(5, 4)}] * 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["advise", "kept_inside:build", "--budget", "5s"])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert "every engine fails on kept_inside:build" in told.err
    assert "problem: the backward pass inside blocks.2 failed" in told.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["user_module"], "user_module names no function; write user_module:build."),
        (["./my.py:build"], "./my.py:build names a file, not a module: write my:build in the folder of my.py."),
        ([MODEL, "--device", "cuda"], "torch finds no device 'cuda' here; leave out --device cuda."),
        ([MODEL, "--budget", "soon"], "--budget takes a time like 90s or 2m, not 'soon'."),
        ([MODEL, "--budget", "0"], "--budget must be above 0 s."),
        (["torch.nn:Identity"], "no engine can be attached to torch.nn:Identity, see above: stay with backprop."),
        (
            ["user_module:build_picky", "--data", DATA],
            f"user_module:build_picky cannot be trained on {DATA}: AssertionError: only pictures",
        ),
        (
            ["user_module:build_tuple", "--data", DATA],
            f"user_module:build_tuple cannot be trained on {DATA}: TypeError: no loss is known of outputs that are a "
            "tuple and a target that is a Tensor: name one, --loss module:function.",
        ),
    ],
)
def test_what_cannot_be_advised_on_is_an_error_in_a_line(args, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    code, _, err = ended(capsys, "advise", *args)
    assert (code, err.strip()) == (2, f"gradfree: error: {message}")


def test_a_model_that_keeps_its_state_between_batches_is_told_to_detach_it(capsys):
    code, _, err = ended(capsys, "advise", "user_module:build_stateful", "--data", DATA)
    assert code == 2
    assert "state.detach()" in err
