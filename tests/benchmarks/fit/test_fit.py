"""``gradfree fit``: the page's commands run, train like a manual loop, and resume exactly."""

import csv
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from places import DOCS

import gradfree
from gradfree.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
PAGE = (DOCS / "guides/fit.md").read_text(encoding="utf-8")
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
USUAL = ["--model=my_module.Net", "--data=my_module.Digits", "--optimizer=SGD", "--optimizer.lr=0.1", *QUIET]
USUAL += ["--trainer.devices=1", "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1"]


@pytest.fixture(autouse=True)
def page(tmp_path, monkeypatch):
    """Write the page's module into the current folder."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_module.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    # Lightning sets this variable.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    torch.set_default_dtype(torch.float32)
    yield
    sys.modules.pop("my_module", None)


def losses(folder, *arguments):
    """Train and return the losses by step."""
    main(["fit", *USUAL, *arguments, "--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}"])
    (file,) = Path(folder).rglob("metrics.csv")
    with file.open(newline="") as rows:
        return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(rows) if row["train_loss"]}


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, capsys):
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL):
        for line in block.replace("\\\n", "").splitlines():
            _, command, *arguments = shlex.split(line)
            main([command, *arguments, *QUIET, "--trainer.devices=1", "--trainer.logger=false"])
    assert float(re.search(r"accuracy\W+([\d.]+)", capsys.readouterr().out)[1]) > 0.5
    (options,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    Path("engine.yaml").write_text(options)
    assert len(losses("logs", "--config=engine.yaml", "--trainer.max_steps=2")) == 2


def test_fit_gives_the_losses_of_a_manual_loop(tmp_path):
    found = losses(
        "logs", "--seed_everything=0", "--model.dropout=0.0", "--trainer.max_steps=4", "--trainer.strategy=dsf"
    )
    import my_module

    torch.manual_seed(0)
    model, data = my_module.Net(dropout=0.0), my_module.Digits()
    data.setup("fit")
    order = torch.randperm(1400, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradfree.create_engine("dsf").attach(model):
        for step, chosen in enumerate(order.split(64)[:4]):
            inputs, targets = data.train[chosen]
            loss = torch.nn.functional.cross_entropy(model.net(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert found[step] == loss.item()


@pytest.mark.slow
def test_a_resumed_run_has_equal_losses(tmp_path):
    """Resumed with another seed, every loss equals the uninterrupted run's."""
    run = ["--trainer.strategy=highway_bp", "--trainer.limit_train_batches=8", "--model.dropout=0.0"]
    whole = losses("whole", *run, "--trainer.max_epochs=3", "--seed_everything=0", "--checkpoint.dirpath=whole")
    first = losses("first", *run, "--trainer.max_epochs=1", "--seed_everything=0", "--checkpoint.dirpath=half")
    again = ["--checkpoint.dirpath=half", "--ckpt_path=last", "--seed_everything=7"]
    assert first | losses("rest", *run, "--trainer.max_epochs=3", *again) == whole
    assert len(set(whole.values())) == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.strategy=highwaybp"], "invalid strategy name"),
        (["--trainer.strategy=highway-bp"], "each also with _ddp, for several devices. Did you mean 'highway_bp'?"),
        (["--trainer.strategy=pepita"], "PEPITA cannot be attached"),
        (["--ckpt_path=nowhere.ckpt"], "nowhere.ckpt"),
        (["--model.depht=3"], "depht"),
    ],
)
def test_invalid_arguments_are_a_one_line_error(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", *USUAL, "--trainer.logger=false", *arguments])
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gradfree: error:")]
    assert message in line
    assert not list(tmp_path.rglob("*.ckpt"))
