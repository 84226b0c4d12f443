"""The package works from a wheel, an editable install and a plain checkout, used from another folder.

A plain loop needs only torch and numpy, strategies need the Lightning extra, and error messages name missing extras.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
from places import PACKAGES, ROOT

pytestmark = pytest.mark.slow

USE = """
import importlib, pathlib, pkgutil, sys
import gradfree
assert "lightning" not in sys.modules, "import gradfree must be quick"
for name in {modules}:
    module = importlib.import_module("gradfree." + name)
    for inner in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if inner.name not in {optional}:
            importlib.import_module(module.__name__ + "." + inner.name)
for name in ("gradfree.algorithms.highway_bp", "gradfree.models.resnet", "gradfree.benchmarks", "gradfree.lightning"):
    assert name in sys.modules, name
assert {{"backprop", "fixed_point", "highway_bp", "truncated"}} <= set(gradfree.list_engines())
model = gradfree.create_model("residual_mlp", in_features=4, num_classes=2)
assert gradfree.create_engine("highway_bp", iterations=2).validate(model).ok
assert importlib.util.find_spec("gradfree.algebra.triton_scan") is not None
for name in ("algorithms", "models", "benchmarks"):
    found = importlib.util.find_spec(name)
    assert found is None or "site-packages" not in pathlib.Path(found.origin).parts, name + " is in site-packages"
print(gradfree.__file__)
"""
# Modules with optional imports: Triton (only in torch's builds for GPUs), Ray, and pytest.
OPTIONAL = {"device", "triton_scan", "ray_workers"}
MODULES = ["algorithms", "models", "benchmarks", "lightning", "testing"] + [
    path.stem for path in (ROOT / "gradfree").glob("[!_]*.py") if path.stem not in OPTIONAL
]


PLAIN_LOOP = """
import sys
import gradfree
import torch
torch.manual_seed(0)
model = gradfree.create_model("residual_mlp", in_features=4, num_classes=2)
optimizer = gradfree.EngineOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, engine="highway_bp", iterations=2)
x, y = torch.randn(16, 4), torch.randint(2, (16,))
losses = []
for _ in range(20):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0]
for name in "lightning", "torchmetrics", "jsonargparse":
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name + " is there")
try:
    import gradfree.lightning
except ImportError as error:
    print(error)
"""
STRATEGY = """
import gradfree
import gradfree.lightning
import lightning
import torch

class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = gradfree.create_model("residual_mlp", in_features=4, num_classes=2)

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(strategy="highway_bp", accelerator="cpu", devices=1, max_epochs=1, **quiet)
trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=8))
assert trainer.global_step == 2
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A new environment with only gradfree's dependencies, from the constraints file."""
    folder = tmp_path_factory.mktemp("bare")
    python = new_environment(folder)
    install(python, "torch")
    install_needs(python, source(folder))
    return python


@pytest.fixture(scope="module")
def environment(bare, tmp_path_factory):
    """An environment that also has the dependencies of the extra "bench"."""
    folder = tmp_path_factory.mktemp("bench")
    python = new_environment(folder, bare)
    install_needs(python, f"{source(folder)}[bench]")
    return python


def new_environment(folder, below=None):
    """Create an environment that also sees the packages of ``below``; return its Python."""
    venv.create(folder, with_pip=True)
    if below is not None:
        (packages,) = folder.glob("lib/python*/site-packages")
        (those,) = below.parents[1].glob("lib/python*/site-packages")
        (packages / "below.pth").write_text(f"{those}\n")
    return folder / "bin" / "python"


def install(python, what, *options):
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *options, what)


def install_needs(python, what):
    """Install gradfree's dependencies without gradfree."""
    install(python, what)
    uninstall(python)


def uninstall(python):
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "gradfree")


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source(folder):
    """Return a copy of tracked and new files, so that building does not change the checkout."""
    copy = folder / "source"
    if not copy.exists():
        names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
        for name in names:
            if (ROOT / name).exists():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
    return copy


def use(python, elsewhere, **variables):
    """Import everything in the folder ``elsewhere``; return the path of the imported gradfree."""
    code = USE.format(modules=MODULES, optional=OPTIONAL)
    return Path(run(python, "-c", code, cwd=elsewhere, env=clean() | variables).strip())


def clean():
    """Return the environment without Python's variables, such as PYTHONPATH."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}


def refusal(*command, **options):
    """Return the one-line error of a command that fails with status 2."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line


def test_a_plain_loop_needs_only_torch_and_numpy(bare, tmp_path):
    install(bare, source(tmp_path))
    try:
        printed = run(bare, "-c", PLAIN_LOOP, cwd=tmp_path, env=clean())
        assert printed.startswith("lightning is not installed; gradfree's extra 'lightning' installs it.")
        assert "shooting" in run(bare.parent / "gradfree", "engines", cwd=tmp_path, env=clean())
        line = refusal(bare.parent / "gradfree", "bench", "report", cwd=tmp_path, env=clean())
        assert line.startswith("gradfree: error: jsonargparse is not installed; gradfree's extra 'bench' installs it.")
        line = refusal(bare.parent / "gradfree", "fit", "--print_config", cwd=tmp_path, env=clean())
        assert "gradfree's extra 'bench' installs it." in line
    finally:
        uninstall(bare)


def test_a_strategy_needs_only_the_lightning_extra(bare, tmp_path):
    python = new_environment(tmp_path / "lightning", bare)
    install(python, f"{source(tmp_path)}[lightning]")
    run(python, "-c", STRATEGY, cwd=tmp_path, env=clean())


def files_of_packages(checkout):
    """Yield the installed names of all files in packages, without records, scripts and clients."""
    for folder, package in PACKAGES.items():
        for path in (checkout / folder).rglob("*"):
            inner = path.relative_to(checkout / folder).as_posix()
            kept_out = folder == "benchmarks" and inner.startswith(("clients/", "results/", "scripts/"))
            if path.is_file() and not kept_out:
                yield f"{package.replace('.', '/')}/{inner}"


def test_wheel(environment, tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, source(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == set(files_of_packages(source(tmp_path)))
    run(environment, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    try:
        assert "site-packages" in use(environment, tmp_path).parts
        engines = run(environment.parent / "gradfree", "engines", cwd=tmp_path)
        assert "highway_bp" in engines
        model = "lightning.pytorch.demos.boring_classes.BoringModel"
        fit = [environment.parent / "gradfree", "fit", "--model", model, "--print_config"]
        assert "highway_bp" in run(*fit, "--trainer.strategy", "highway_bp", cwd=tmp_path)
    finally:
        uninstall(environment)


def test_editable_install(environment, tmp_path):
    checkout = source(tmp_path)
    run(environment, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", checkout)
    try:
        assert use(environment, tmp_path).is_relative_to(checkout)
        assert use(environment, checkout).is_relative_to(checkout)
    finally:
        uninstall(environment)


def test_plain_checkout(environment, tmp_path):
    checkout = source(tmp_path)
    assert use(environment, tmp_path, PYTHONPATH=str(checkout)).is_relative_to(checkout)
