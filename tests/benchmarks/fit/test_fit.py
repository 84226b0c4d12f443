"""``gradfree fit``: what it trains is what a loop by hand trains, and a killed run goes on to the last bit."""

import csv
import os
import re
import shlex
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from places import DOCS, SUPPORT
from torch.utils.data import DistributedSampler, TensorDataset

import gradfree
from gradfree.benchmarks.data.stored import DATA_ROOT
from gradfree.benchmarks.fit import datamodules as lightning_data
from gradfree.benchmarks.fit.arguments import CONFIGS, expanded
from gradfree.cli import UsageError, main
from gradfree.lightning import ResumableLoader

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
stored = pytest.mark.skipif(DATA_ROOT not in os.environ, reason=f"{DATA_ROOT} is not set")
TRIED = [name for name in CONFIGS if name.startswith(("digits", "pydoc"))]
TRIED += [pytest.param(name, marks=stored) for name in CONFIGS if name.startswith(("tinyshakespeare", "wikitext"))]
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Checkpoints and logs go to a folder of their own; numbers are those of the command line."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    # Lightning puts the seed there.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def logged(folder, *arguments):
    """The training's losses by step."""
    log = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}", "--trainer.log_every_n_steps=1"]
    main(["fit", *arguments, *QUIET, *log])
    return losses(folder)


def losses(folder):
    (file,) = Path(folder).rglob("metrics.csv")
    with file.open(newline="") as rows:
        return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(rows) if row["train_loss"]}


def imported(spec, *args):
    """What a class path and arguments mean, to those who know nothing of the command line."""
    module, _, name = spec["class_path"].rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)(*args, **spec.get("init_args", {}))


def by_hand(config, steps):
    """The losses of ``steps`` steps of plain PyTorch."""
    torch.manual_seed(config["seed_everything"])
    net = imported(config["model"]["init_args"]["net"])
    train = imported(config["data"]).load().train
    size = config["data"]["init_args"]["batch_size"]
    order = torch.randperm(len(train.inputs), generator=torch.Generator().manual_seed(config["seed_everything"]))
    strategy = config["trainer"]["strategy"]
    engine = gradfree.create_engine(strategy["init_args"]["engine"], **strategy["dict_kwargs"])
    optimizer = imported(config["optimizer"], net.parameters())
    schedule = imported(config["lr_scheduler"], optimizer)
    found = {}
    with engine.attach(net):
        for step, chosen in enumerate(order.split(size)[:steps]):
            logits = net(train.inputs[chosen])
            loss = torch.nn.functional.cross_entropy(logits.movedim(-1, 1), train.targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            found[step] = loss.item()
    return found


@pytest.mark.parametrize("name", TRIED)
def test_a_configuration_trains_as_a_loop_by_hand_does(name, tmp_path):
    config = yaml.safe_load(CONFIGS[name].read_text())
    found = logged(tmp_path, "--config", name, "--trainer.max_steps=4", "--trainer.limit_val_batches=1")
    assert found == by_hand(config, 4)
    assert len(set(found.values())) == 4


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["fit", *arguments, "--print_config"])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", CONFIGS)
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


RUN = {
    # Dropout, a running mean of gates, and validation that ends each epoch of eight batches.
    "pydoc_gru_dsf": ["--model.net.width=16", "--model.net.dropout=0.2"],
    # A matrix that is kept for some steps, and projections now and then.
    "digits_foton": ["--engine=foton", "--engine.orthogonalize_every=3", "--engine.refresh_feedback_every=5"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "every", "kill", "first"),
    [("pydoc_gru_dsf", 3, 13, 12), ("pydoc_gru_dsf", 8, 9, 8), ("digits_foton", 3, 14, 12)],
    ids=["in the middle of an epoch", "at the end of an epoch", "an engine that counts steps"],
)
def test_a_killed_run_goes_on_to_the_last_bit(name, every, kill, first, tmp_path):
    """kill -9 in an epoch; resumed, under another seed, every loss is the uninterrupted run's."""
    run = ["--config", name, *RUN[name], "--trainer.max_epochs=3", "--trainer.limit_train_batches=8"]
    run += ["--trainer.val_check_interval=1.0", "--trainer.check_val_every_n_epoch=1", "--trainer.limit_val_batches=1"]
    run += [f"--checkpoint.every_n_train_steps={every}"]
    whole = logged(tmp_path / "whole", *run, "--checkpoint.dirpath=whole")
    assert list(whole) == list(range(24))
    assert len(set(whole.values())) == 24

    killed = [*run, *QUIET, "--checkpoint.dirpath=killed"]
    killed += ["--trainer.callbacks=killing.Kill", f"--trainer.callbacks.steps={kill}"]
    code = "import sys, torch; torch.set_num_threads(1); from gradfree.cli import main; main(sys.argv[1:])"
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, "fit", *killed],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr

    resume = ["--checkpoint.dirpath=killed", "--ckpt_path=last", "--seed_everything=7"]
    resumed = logged(tmp_path / "resumed", *run, *resume)
    assert resumed == {step: loss for step, loss in whole.items() if step >= first}


@pytest.mark.slow
def test_a_fit_on_two_devices_trains_validates_saves_and_both_processes_end(tmp_path):
    """The second process is Lightning's to start, by the same command; it has the same output, which ends with both."""
    script = tmp_path / "fit.py"
    script.write_text("import torch; torch.set_num_threads(1)\nfrom gradfree.cli import main; main()\n")
    run = ["--config=digits_highway_bp", "--engine=highway_bp_ddp", "--trainer.devices=2", "--trainer.max_steps=4"]
    run += ["--trainer.val_check_interval=2", "--trainer.limit_val_batches=1", "--checkpoint.every_n_train_steps=2"]
    run += ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", "--trainer.log_every_n_steps=1"]
    process = subprocess.Popen(
        [sys.executable, script, "fit", *run, *QUIET],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    assert "Starting with 2 processes" in output
    assert "Traceback" not in output
    assert list(losses("logs")) == [0, 1, 2, 3]
    (last,) = tmp_path.rglob("last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 4


def test_validation_leaves_the_training_as_it_is(tmp_path):
    """Dropout draws the same numbers whether the epochs of two batches end in validation or not."""
    run = ["--config", "pydoc_gru_dsf", *RUN["pydoc_gru_dsf"], "--trainer.max_steps=6", "--trainer.max_epochs=3"]
    run += [
        "--trainer.limit_train_batches=2",
        "--trainer.val_check_interval=1.0",
        "--trainer.check_val_every_n_epoch=1",
    ]
    without, validated = (logged(tmp_path / name, *run, f"--trainer.limit_val_batches={name}") for name in ("0", "1"))
    assert validated == without
    assert len(validated) == 6


def test_test_scores_the_last_checkpoint(tmp_path, capsys):
    logged(tmp_path, "--config", "digits_foton", "--trainer.max_steps=20", "--checkpoint.every_n_train_steps=10")
    main(["test", "--config", "digits_foton", "--ckpt_path", "last", *QUIET, "--trainer.logger=false"])
    shown = float(re.search(r"test_accuracy\W+([\d.]+)", capsys.readouterr().out)[1])
    net = imported(yaml.safe_load(CONFIGS["digits_foton"].read_text())["model"]["init_args"]["net"])
    (last,) = tmp_path.rglob("last.ckpt")
    weights = torch.load(last, weights_only=True)["state_dict"]
    net.load_state_dict({key.removeprefix("net."): value for key, value in weights.items()})
    images, labels = lightning_data.Digits().load().test
    assert shown == pytest.approx((net.eval()(images).argmax(1) == labels).float().mean().item(), abs=1e-6)
    assert 0.2 < shown < 1.0
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "highwaybp"], "no engine is called 'highwaybp'; did you mean 'highway_bp'? There are: backprop,"),
        (["--trainer.strategy=nothing"], "no engine is called 'nothing'; there are: backprop,"),
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
        r"gradfree: error: sklearn.* is not installed; .* Do: pip install 'gradfree\[bench\]', .*", last
    )


class Broken(torch.nn.Module):
    def __init__(self):
        raise ValueError("on purpose")


def test_what_breaks_in_the_users_own_code_shows_where(tmp_path):
    with pytest.raises(ValueError, match="on purpose"):
        main(["fit", "--config", "digits_highway_bp", "--model.net", f"{__name__}.Broken", *QUIET])


def test_parts_that_nobody_has_put_together_before(tmp_path):
    """All from options: the network by its name, a data module and a module by their classes'."""
    found = logged(
        tmp_path,
        *("--model=Classifier", "--model.net", "residual_mlp", "--model.net.in_features=64"),
        *("--model.net.num_classes=10", "--data=Digits", "--optimizer=SGD", "--optimizer.lr=0.1"),
        *("--engine", "highway_bp", "--engine.iterations=8", "--trainer.devices=1", "--trainer.max_steps=40"),
    )
    assert len(found) == 40
    assert found[39] < 0.5 * found[0]


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


def loader(epoch, state=None):
    examples = TensorDataset(torch.arange(10))
    sampler = DistributedSampler(examples, 1, 0, seed=3)
    sampler.set_epoch(epoch)
    loader = ResumableLoader(examples, 2, sampler=sampler)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def batches(loader):
    return [batch[0].tolist() for batch in loader]


def test_a_loader_goes_on_with_the_next_batch_of_its_epoch_only():
    first = loader(4)
    seen = [batch[0].tolist() for batch in islice(first, 3)]
    state = first.state_dict()
    resumed = loader(4, state)
    assert seen + batches(resumed) == batches(loader(4))
    assert batches(resumed) == batches(loader(4))
    assert batches(loader(5, state)) == batches(loader(5))
    assert batches(loader(4)) != batches(loader(5))


def test_behind_the_last_batch_of_a_sampler_without_epochs_begins_the_next_epoch():
    """The place (0, 5) of a sampler that counts no epochs is the end of one: nothing of the next may be left out."""
    examples = TensorDataset(torch.arange(10))
    first = ResumableLoader(examples, 2)
    whole = batches(first)
    for place in (5, 2):
        resumed = ResumableLoader(examples, 2)
        resumed.load_state_dict({"epoch": 0, "batches": place})
        assert batches(resumed) == whole[place % 5 :]
        assert batches(resumed) == whole


def test_a_loader_draws_nothing_that_dropout_would_draw():
    """Each iterator of a loader without a generator of its own moves torch's; it follows the seed nevertheless."""
    before = torch.get_rng_state()
    one, other = loader(4), loader(4)
    batches(one)
    assert torch.equal(torch.get_rng_state(), before)
    assert one.generator is not other.generator
    torch.manual_seed(7)
    assert loader(4).generator.initial_seed() == 7


def test_a_place_that_was_loaded_is_saved_again_before_the_first_batch():
    resumed = loader(4, {"epoch": 4, "batches": 3})
    assert resumed.state_dict() == {"epoch": 4, "batches": 3}
    next(iter(resumed))
    assert resumed.state_dict() == {"epoch": 4, "batches": 4}


def test_devices_share_the_examples_between_them(monkeypatch):
    """No example twice, none left out but what fills no batch; validation examples are Lightning's to share."""
    data = lightning_data.Digits(batch_size=50)
    data.setup("fit")
    total = len(data.data.train.inputs)
    data.data = data.data._replace(train=(torch.arange(total), torch.zeros(total)))
    seen = []
    for rank in range(3):
        data.trainer = type("Trainer", (), {"world_size": 3, "global_rank": rank})()
        loader = data.train_dataloader()
        assert len(loader) == total // 3 // 50
        seen += [int(x) for inputs, _ in loader for x in inputs]
    assert len(set(seen)) == len(seen) == 3 * 50 * len(loader)


def test_stored_texts_are_cut_as_the_options_say(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_ROOT, str(tmp_path))
    kinds = {"tinyshakespeare": lightning_data.TinyShakespeare, "wikitext-2": lightning_data.WikiText2}
    for folder, kind in kinds.items():
        (tmp_path / folder).mkdir()
        for split in ("train", "validation", "test"):
            rows = Dataset.from_dict({"text": ["a b a b"]})
            rows.to_parquet(str(tmp_path / folder / f"{split}-00000-of-00001.parquet"))
        data = kind(length=3)
        data.setup("fit")
        assert data.data.train.inputs.shape[1] == 3
