"""The command line: lists, help and errors."""

import runpy
import sys
from pathlib import Path

import pytest

import gradfree
from gradfree.cli import main


def outcome(capsys, *args):
    """Exit code, output and error of a command that ends the process."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return ended.value.code, out, err


@pytest.mark.parametrize(
    ("command", "names"), [("engines", gradfree.list_engines()), ("models", gradfree.list_models())]
)
def test_lists_have_a_line_for_each_name(command, names, capsys):
    main([command])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == names
    assert all(len(line.split()) > 3 for line in lines)


def test_a_named_engine_is_listed_with_its_options(capsys):
    main(["engines", "truncated", "dfa"])
    out = capsys.readouterr().out
    assert out.startswith(f"truncated: {gradfree.algorithms.Truncated.__doc__.splitlines()[0]}")
    assert "Options and defaults:\n    window = 1\n\ndfa: " in out


def test_names_may_have_hyphens_for_underscores(capsys):
    main(["engines", "highway-bp"])
    assert capsys.readouterr().out.startswith("highway_bp: ")


def test_an_unknown_engine_raises_and_lists_the_known_ones(capsys):
    code, out, err = outcome(capsys, "engines", "highway")
    assert (code, out) == (2, "")
    assert err.startswith("gradfree: error: no engine is called 'highway'; there are: auto, backprop, ")


def test_python_m_prints_the_version(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gradfree", "--version"])
    runpy.run_module("gradfree", run_name="__main__")
    assert capsys.readouterr().out == f"gradfree {gradfree.__version__}\n"


def test_modules_of_the_current_folder_are_found(tmp_path, monkeypatch, capsys):
    """A console script has its own folder on the path; the module ``mine`` is in the current folder."""
    (tmp_path / "mine.py").write_text("raise SystemExit('mine is imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(sys.executable).parent), *(entry for entry in sys.path[1:] if entry)])
    with pytest.raises(SystemExit):
        main(["advise", "mine:build"])
    assert "SystemExit: mine is imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["engines", "models", "bench", "Compare engines", "fit", "Train a model with an engine"]),
        (["bench"], ["run", "report"]),
        (["bench", "run"], ["--suite", "--retry", "--batch-size", "--config", '"quick"']),
        (["advise"], ["model", "--data", "--loss", "--chains", "--device DEVICE", "--budget", "--out"]),
        (["fit"], ["--trainer.strategy", "highway_bp", "--ckpt_path", "--checkpoint.dirpath"]),
    ],
)
def test_help(args, words, capsys):
    code, out, _ = outcome(capsys, *args, "--help")
    assert code == 0
    assert [word for word in words if word not in out] == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--suite", "quik"], "Did you mean 'quick'?"),
        (["--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["--seeds", "many"], "--seeds takes a whole number, not many."),
        (["--tasks", "digits", "--target", "nan"], "--target takes a number, not nan."),
        (["--tasks", "digits", "--target", ".nan"], "--target must be a number, a validation score, not nan."),
        (["--tasks", "digits", "--steps", "many"], "--steps takes a whole number, not many."),
        (["--sedes", "3"], "unrecognized arguments: --sedes 3. Did you mean '--seeds'?"),
        (["--seed", "3"], "unrecognized arguments: --seed 3. Did you mean '--seeds'?"),
        (["--out", f"{__file__}/records"], "cannot make the folder"),
    ],
)
def test_bad_options_are_refused_in_one_line(args, message, capsys, monkeypatch):
    code, out, err = outcome(capsys, "bench", "run", *args)
    assert code == 2
    assert out == ""
    assert message in err.splitlines()[-1] or message in err.splitlines()[-2]
    assert "error: " in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["advize", "mine:build"], "no command is called 'advize'; there are: engines, models, advise, bench,"),
        (["bench", "rum"], "no command is called 'rum'; there are: run, report. Did you mean 'run'?"),
        (["advise"], "the following arguments are required: model"),
        (["advise", "nowhere:build"], "nowhere:build: the module nowhere cannot be imported: ModuleNotFoundError"),
    ],
)
def test_wrong_words_are_refused_with_the_known_ones(args, message, capsys):
    code, out, err = outcome(capsys, *args)
    assert (code, out) == (2, "")
    assert f"error: {message}" in err or message in err.splitlines()[-1]


@pytest.mark.parametrize("key", ["engins: fa", "engins: {fa: {seed: 1}}"])
def test_an_unknown_key_of_a_configuration_file_is_named_with_the_file_and_the_nearest_option(key, capsys, tmp_path):
    (file := tmp_path / "bad.yaml").write_text(f"tasks: digits\n{key}\n", encoding="utf-8")
    code, out, err = outcome(capsys, "bench", "run", "--config", str(file))
    assert (code, out) == (2, "")
    assert err == f"gradfree: error: {file}: no option is called 'engins'. Did you mean 'engines'?\n"
    code, _, err = outcome(capsys, "bench", "run", "--config", "{sedes: 1, engins: fa}")
    assert (code, err) == (2, "gradfree: error: --config: no option is called 'engins'. Did you mean 'engines'?\n")


def test_a_missing_device_is_refused_before_anything_starts(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    code, _, err = outcome(capsys, "bench", "run", "--device", "cuda", "--out", str(tmp_path / "out"))
    assert code == 2
    assert err.splitlines() == ["gradfree: error: torch finds no device 'cuda' here; leave out --device cuda."]
    assert not (tmp_path / "out").exists()
