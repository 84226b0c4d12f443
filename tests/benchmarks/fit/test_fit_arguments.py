"""The command line of ``gradfree fit``: what is short, what is printed, what is refused."""

import re
import shlex
import sys

import pytest
import yaml
from fit_runs import QUIET
from places import DOCS

from gradfree.benchmarks.data.stored import DATA_ROOT
from gradfree.benchmarks.fit.arguments import CONFIGS, expanded
from gradfree.cli import UsageError, main

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["fit", *arguments, "--print_config"])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "name", [n if n == "pydoc_gru_dsf" else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS]
)
def test_a_printed_configuration_is_the_same_configuration(name, tmp_path, capsys):
    first = printed(capsys, "--config", name)
    (tmp_path / "own.yaml").write_text(first)
    assert printed(capsys, "--config", "own.yaml") == first
    assert contains(yaml.safe_load(first), yaml.safe_load(CONFIGS[name].read_text()))


@pytest.mark.parametrize(
    ("arguments", "engine", "options"),
    [
        (["--engine", "truncated", "--engine.window=3"], "truncated", {"window": 3}),
        (["--engine.gamma", "0.2"], "highway_bp", {"iterations": 2, "gamma": 0.2}),
    ],
)
def test_another_engine_has_none_of_the_configurations_options(arguments, engine, options, capsys):
    strategy = yaml.safe_load(printed(capsys, "--config", "digits_highway_bp", *arguments))["trainer"]["strategy"]
    assert (strategy["init_args"]["engine"], strategy["dict_kwargs"]) == (engine, options)


def contains(whole, part):
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    return whole == part


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "highwaybp"], "no engine is called 'highwaybp'; did you mean 'highway_bp'? There are: auto,"),
        (["--trainer.strategy=xyz"], "no engine is called 'xyz'; there are: auto, backprop,"),
        (["--engine.iterations=-1"], "HighwayBP: iterations must be at least 0, not -1."),
        (["--engine.sweeps=1"], "neither 'highway_bp' nor SingleDeviceStrategy has an option 'sweeps'; the engine's"),
        (["--engine=pepita"], "PEPITA cannot be attached to Classifier: - the model has no chain that can be found"),
        (["--trainer.devices=2"], "on one device, but was given devices=2. Use the strategy '<engine>_ddp'"),
        (["--model.net", "resnet"], "no model is called 'resnet'; there are: gpt,"),
        (["--model.net.depth=9"], "depth must be 6n + 2"),
        (["--config", "digits"], "there is no file 'digits', and the configurations by name are: cifar10_highway_bp,"),
        (["--ckpt_path=nowhere.ckpt"], "Checkpoint file not found: nowhere.ckpt"),
        (["--data.batch_size=2000"], "batch_size is 2000, but each device has 1077 examples."),
        (["--data", "MNIST"], "the set mnist is needed, but GRADFREE_DATA does not name the folder"),
        (["--optimizer=null", "--lr_scheduler=null"], "there is no optimizer; say which: --optimizer AdamW"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(DATA_ROOT, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "digits_highway_bp", *QUIET, *arguments])
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gradfree: error:")]
    assert message in line
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --model (all options: gradfree fit --help)"),
        (
            ["--config=digits_highway_bp", "--engine=highwy_bp", "--print_config"],
            "no engine is called 'highwy_bp'; did",
        ),
        (["--config=digits_highway_bp", "--engine.iteration=2", "--print_config"], "has an option 'iteration'"),
        (["--config=digits_highway_bp", "--engine.iterations=-1", "--print_config"], "iterations must be at least 0"),
    ],
)
def test_what_cannot_be_run_is_not_printed(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", *arguments])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert not shown.out


def test_a_missing_package_of_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "gradfree.benchmarks.data.bundled", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "digits_highway_bp", *QUIET])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"gradfree: error: sklearn.* is not installed; .* Do, in a checkout of it: pip install '\.\[bench\]'", last
    )


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["--engine", "dsf"], ["--trainer.strategy", "dsf"]),
        (["--engine=dsf", "--x=1"], ["--x=1", "--trainer.strategy", "dsf"]),
        (["--engine.iterations=2"], ["--trainer.strategy.dict_kwargs.iterations=2"]),
        (["--model.net=gpt"], ["--model.net", "gradfree.models.gpt.GPT"]),
        (["--model.net", "GPT"], ["--model.net", "gradfree.models.gpt.GPT"]),
        (["--model.net", "other.Net"], ["--model.net", "other.Net"]),
        (["--model.net.help", "gpt"], ["--model.net.help", "gradfree.models.gpt.GPT"]),
        (["-c", "digits_foton.yaml"], ["-c", str(CONFIGS["digits_foton"])]),
    ],
)
def test_what_is_short_means_what_is_long(short, long):
    assert expanded(short) == long


def test_an_engines_options_may_come_before_it():
    kind = ["--trainer.strategy", "auto", "--trainer.strategy.class_path", "gradfree.lightning.EngineDDPStrategy"]
    name = ["--trainer.strategy.init_args.engine", "dsf"]
    options = ["--trainer.strategy.dict_kwargs.feedback", "gate"]
    assert expanded(["--engine.feedback", "gate", "--engine", "dsf_ddp"]) == [*kind, *name, *options]


def test_the_commands_of_the_page_are_understood(capsys):
    """Every `gradfree fit` of docs/fit.md, parsed to the end; and the page lists what comes with gradfree."""
    page = (DOCS / "fit.md").read_text(encoding="utf-8")
    shown = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).replace("\\\n", "")
    commands = [shlex.split(line)[2:] for line in shown.splitlines() if line.startswith("gradfree fit")]
    assert len(commands) == 5
    for arguments in commands:
        printed(capsys, *arguments)
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == list(CONFIGS)
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert contains(yaml.safe_load(CONFIGS["digits_highway_bp"].read_text()), yaml.safe_load(example))


def test_a_file_of_ones_own_comes_before_a_configuration_of_that_name(tmp_path):
    (tmp_path / "digits_foton").write_text("seed_everything: 1\n")
    assert expanded(["--config=digits_foton"]) == ["--config", "digits_foton"]
    with pytest.raises(UsageError, match="there is no file 'digits_none'"):
        expanded(["--config=digits_none"])
