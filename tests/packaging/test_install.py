"""The package works from a wheel, an editable install and a plain checkout, each from another folder."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
# Triton comes with torch's builds for GPUs only, and nothing but the scan on a GPU asks for it.
# Ray and Optuna come with extras of their own.
OPTIONAL = {"triton_scan", "ray_workers", "search", "space", "study"}
MODULES = ["algorithms", "models", "benchmarks", "lightning", "testing"] + [
    path.stem for path in (ROOT / "gradfree").glob("[!_]*.py") if path.stem not in OPTIONAL
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new environment with gradfree's dependencies from the constraints file, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    constraints = ["-c", str(ROOT / "constraints.txt")]
    run(python, "-m", "pip", "install", "--quiet", *constraints, "torch")
    run(python, "-m", "pip", "install", "--quiet", *constraints, f"{source(folder)}[bench]")
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "gradfree")
    return python


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def source(folder):
    """Return a copy of the tracked and new files, so that building leaves no trace in the checkout."""
    copy = folder / "source"
    if not copy.exists():
        names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
        for name in names:
            if (ROOT / name).exists():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
    return copy


def use(python, elsewhere, **variables):
    """Import everything in ``elsewhere``; return where gradfree came from."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | variables
    code = USE.format(modules=MODULES, optional=OPTIONAL)
    return Path(run(python, "-c", code, cwd=elsewhere, env=environment).strip())


def test_wheel(environment, tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, source(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    run(environment, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    try:
        assert "site-packages" in use(environment, tmp_path).parts
        engines = run(environment.parent / "gradfree", "engines", cwd=tmp_path)
        assert "highway_bp" in engines
        fit = [environment.parent / "gradfree", "fit", "--config", "digits_highway_bp", "--print_config"]
        assert "PreActResNet" in run(*fit, cwd=tmp_path)
    finally:
        run(environment, "-m", "pip", "uninstall", "--quiet", "--yes", "gradfree")


def test_editable_install(environment, tmp_path):
    checkout = source(tmp_path)
    run(environment, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", checkout)
    try:
        assert use(environment, tmp_path).is_relative_to(checkout)
        assert use(environment, checkout).is_relative_to(checkout)
    finally:
        run(environment, "-m", "pip", "uninstall", "--quiet", "--yes", "gradfree")


def test_plain_checkout(environment, tmp_path):
    checkout = source(tmp_path)
    assert use(environment, tmp_path, PYTHONPATH=str(checkout)).is_relative_to(checkout)
