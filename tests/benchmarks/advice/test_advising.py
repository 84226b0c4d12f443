"""``gradfree advise`` on a user's model, from the command line."""

import polars as pl
import pytest

from gradfree.cli import main

MODEL, DATA = "user_module:build", "user_module:loader"


def ended(capsys, *args):
    """Return exit code, output and error output of a command that exits."""
    with pytest.raises(SystemExit) as end:
        main(args)
    return end.value.code, *capsys.readouterr()


@pytest.fixture
def uncompiled(monkeypatch):
    """Skip compiling, which is slow and runs in another process, without patches."""
    monkeypatch.setattr("gradfree.benchmarks.advice.advising.compiled_cost", lambda *_: "not compiled")


@pytest.mark.slow
def test_the_answer_comes_first_and_verbose_lists_every_engine(capsys, tmp_path, uncompiled, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(["advise", MODEL, "--budget", "20s", "--out", str(tmp_path), "--verbose"])
    out = capsys.readouterr().out
    assert out.startswith(("Take ", "Stay with autograd"))
    assert f"A training step of {MODEL} on {DATA}: batch (16, 4), (16,); cpu," in " ".join(out.split())
    # The table is not split: its head appears once.
    assert out.count("cosine") == 1 + out.count("(cosine")
    (head,) = [line for line in out.splitlines() if "cosine" in line and "MiB" in line]
    assert head.index("ms") < head.index("×") < head.index("cosine")
    assert out.index(head) < out.index("chain 'blocks'")
    assert "backprop:\n  note: nothing is attached" in out
    before, _, _ = out.partition("\n  problem: the model has no chain")
    assert {"foton", "orthogonal_backprop", "pepita"} <= set(before.splitlines()[-1].removesuffix(":").split(", "))
    markdown = (tmp_path / "report.md").read_text()
    assert not [label for label in ("highway_bp k=0", "fixed_point k=4", "truncated window=8") if label not in markdown]
    assert "dsf feedback=gate" not in markdown
    assert " failed: " not in markdown
    facts = pl.read_parquet(tmp_path / "report.parquet")
    assert facts.filter(row="autograd", metric="step time", unit="× autograd")["value"].to_list() == [1.0]
    exact = facts.filter(pl.col("row").is_in(["highway_bp k=4", "deeppcr"]), metric="cosine")["value"]
    assert all(cosine > 1 - 1e-6 for cosine in exact)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["user_module:build", "--data", "user_module:spoilt"], "look for NaN or infinite numbers"),
        (["user_module"], "user_module names no function; write user_module:build."),
        ([MODEL, "--device", "cuda"], "torch finds no device 'cuda' here; leave out --device cuda."),
        ([MODEL, "--engines", "damped"], "no engine is called 'damped'"),
        ([MODEL, "--budget", "soon"], "--budget takes a time like 90s or 2m, not 'soon'."),
        (
            ["user_module:build_tuple", "--data", DATA],
            f"user_module:build_tuple cannot be trained on {DATA}: TypeError: there is no default loss for outputs "
            "that are a tuple and a target that is a Tensor: give one, --loss module:function.",
        ),
        (
            ["user_module:build", "--chains", "blokcs"],
            "user_module:build has no module 'blokcs'. Did you mean 'blocks'?",
        ),
    ],
)
def test_unusable_arguments_are_a_one_line_error(args, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    code, _, err = ended(capsys, "advise", *args)
    assert code == 2
    assert err.strip().startswith("gradfree: error: ")
    assert message in err


def test_the_error_for_a_stateful_model_says_to_detach_the_state(capsys):
    code, _, err = ended(capsys, "advise", "user_module:build_stateful", "--data", DATA)
    assert code == 2
    assert "state.detach()" in err


def test_a_chain_of_blocks_is_a_list_of_their_names_also_of_numbers(capsys, tmp_path, monkeypatch):
    """Names in a Sequential are numbers. Blocks that are named like chains are refused once, with the list."""
    text = "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
    (tmp_path / "only_a_model.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    command = ["advise", "only_a_model:build", "--engines", "fixed_point", "--chains"]
    main([*command, "[[0, 1]]"])
    assert "chain '0, 1': 2 blocks" in capsys.readouterr().out
    main([*command, "0,1"])
    out = capsys.readouterr().out
    assert "'0', '1' are of class Linear" in out
    assert out.count("or a list of blocks: [['0', '1']].") == out.count("Possible chains") == 1
    assert "If these are the blocks of one chain: --chains '[[0, 1]]'." in out


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("user_module:build_wide_cell", "no engine would gain anything on user_module:build_wide_cell"),
        (MODEL, f"no engine can be attached to {MODEL}"),
    ],
)
def test_without_an_engine_to_try_the_answer_says_why(model, reason, capsys):
    main(["advise", model, "--engines", "newton"])
    assert f"Stay with autograd: {reason}." in " ".join(capsys.readouterr().out.split())
