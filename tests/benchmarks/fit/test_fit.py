"""``gradfree fit``: what it trains is what a loop by hand trains, and a killed run goes on to the last bit."""

import fcntl
import os
import re
import signal

import pytest
import torch
import yaml
from fit_runs import QUIET, logged, losses
from forked_scripts import Script

import gradfree
from gradfree.benchmarks.data.stored import DATA_ROOT
from gradfree.benchmarks.fit import datamodules as lightning_data
from gradfree.benchmarks.fit.arguments import CONFIGS
from gradfree.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
stored = pytest.mark.skipif(DATA_ROOT not in os.environ, reason=f"{DATA_ROOT} is not set")
QUICK = ("digits_highway_bp", "pydoc_gru_dsf")
TRIED = [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in ("digits_foton", "pydoc_gpt_highway_bp"))]
TRIED += [pytest.param(n, marks=[stored, pytest.mark.slow]) for n in CONFIGS if n.startswith(("tiny", "wikitext"))]


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


RUN = {
    # Dropout, a running mean of gates, and validation that ends each epoch of eight batches.
    "pydoc_gru_dsf": ["--model.net.width=16", "--model.net.dropout=0.2"],
    # A matrix that is kept for some steps, and projections now and then.
    "digits_foton": ["--engine=foton", "--engine.orthogonalize_every=3", "--engine.refresh_feedback_every=5"],
}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "every", "kill", "first"),
    [("pydoc_gru_dsf", 3, 13, 12), ("digits_foton", 8, 9, 8)],
    ids=["in the middle of an epoch", "at the end of an epoch, an engine that counts steps"],
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
    (tmp_path / "fit.py").write_text("from gradfree.cli import main\n\nmain()\n")
    status, said = Script(tmp_path / "fit.py", "fit", *killed).ended()
    assert status == -signal.SIGKILL, said

    resume = ["--checkpoint.dirpath=killed", "--ckpt_path=last", "--seed_everything=7"]
    resumed = logged(tmp_path / "resumed", *run, *resume)
    assert resumed == {step: loss for step, loss in whole.items() if step >= first}


@pytest.mark.processes
@pytest.mark.slow
def test_a_fit_on_two_devices_trains_validates_saves_and_both_processes_end(tmp_path):
    """The second process is Lightning's to start, by the same command; each has a lock, which ends with it."""
    held = "import fcntl, os, torch\nheld = open(os.environ.get('LOCAL_RANK', '0') + '.lock', 'w')\n"
    held += "fcntl.flock(held, fcntl.LOCK_EX)\ntorch.set_num_threads(1)\n"
    (tmp_path / "fit.py").write_text(f"{held}from gradfree.cli import main; main()\n")
    run = ["--config=digits_highway_bp", "--engine=highway_bp_ddp", "--trainer.devices=2", "--trainer.max_steps=4"]
    run += ["--trainer.val_check_interval=2", "--trainer.limit_val_batches=1", "--checkpoint.every_n_train_steps=2"]
    run += ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs", "--trainer.log_every_n_steps=1"]
    status, output = Script(tmp_path / "fit.py", "fit", *run, *QUIET).ended(240)
    assert status == 0, output
    for rank in "01":
        with open(f"{rank}.lock") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
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


class Broken(torch.nn.Module):
    def __init__(self):
        raise ValueError("on purpose")


def test_what_breaks_in_the_users_own_code_shows_where(tmp_path):
    with pytest.raises(ValueError, match="on purpose"):
        main(["fit", "--config", "digits_highway_bp", "--model.net", f"{__name__}.Broken", *QUIET])


@pytest.mark.slow
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
