"""Imports have no cycles, packages and files stay small, and the core needs only torch and numpy.

The order of the packages is checked by import-linter's contracts in pyproject.toml (``make lint``).
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter

import pytest
import torch
from places import PACKAGES, ROOT

from gradfree.checkout import tomllib

# Allowed imports of the core, besides the standard library. Triton is part of torch's builds for GPUs.
ALLOWED = {"gradfree", "numpy", "tomli", "torch", "triton"}
# Modules that may import packages of the extras.
WITH_EXTRAS = (
    "gradfree/command_parser.py",
    "gradfree/huggingface/",
    "gradfree/lightning/",
    "gradfree/testing/",
    "benchmarks/",
)


def modules():
    """Return the installed names of all modules with their files, without scripts and clients."""
    excluded = {path for room in ("scripts", "clients") for path in (ROOT / "benchmarks" / room).rglob("*.py")}
    found = {}
    for folder, package in PACKAGES.items():
        for path in set((ROOT / folder).rglob("*.py")) - excluded:
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *inner)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path):
    """Yield the full names of all imports in a file, including those in functions and for annotations."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in inner)


def test_imports_have_no_cycle():
    """Modules have a topological order; otherwise ``prepare`` raises and names a cycle."""
    graph = {name: set(imports(path)) & MODULES.keys() for name, path in MODULES.items()}
    assert sum(map(len, graph.values())) > 500
    TopologicalSorter(graph).prepare()


def test_the_core_imports_only_torch_and_numpy():
    allowed = ALLOWED | sys.stdlib_module_names | {"tomllib"}  # Of Python 3.11; tomli stands in for it before.
    files = {str(path.relative_to(ROOT)): path for path in MODULES.values()}
    core = {name: path for name, path in files.items() if not name.startswith(WITH_EXTRAS)}
    assert len(core) > 70
    tops = {(name, full.partition(".")[0]) for name, path in core.items() for full in imports(path)}
    assert not {(name, top) for name, top in tops if top not in allowed}


STEP = """
import gradfree, torch

class Centred(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("centre", torch.zeros(1, 3))

    def forward(self, x):
        y = super().forward(x) - 0.1 * self.centre
        self.centre = 0.9 * self.centre + y.detach().mean(0, keepdim=True)
        return y

chain = torch.nn.Sequential(*(torch.nn.Sequential(Centred(), torch.nn.Tanh()) for _ in range(4)))
with gradfree.create_engine("fixed_point", iterations=1).attach(torch.nn.Sequential(chain)) as handle:
    chain(torch.randn(2, 3)).sum().backward()
assert chain[0][0].weight.grad is not None
"""


def loaded(code):
    """Return the names of the modules that are loaded after running ``code``."""
    code = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_and_first_step_load_no_optional_packages():
    """Neither loads packages of the extras, nor torch's compiler, which takes seconds."""
    modules = loaded(STEP)
    assert {"gradfree", "torch"} <= modules
    assert modules.isdisjoint(
        ("lightning", "pytorch_lightning", "torchmetrics", "transformers", "jsonargparse", "matplotlib", "scipy")
    )
    if torch.__version__ >= "2.7":  # In torch 2.6 vmap itself loads the compiler.
        assert "torch._dynamo" not in modules


@pytest.mark.slow
def test_commands_load_no_slow_packages():
    """Slow packages are imported only where they are used."""
    modules = loaded("import gradfree.benchmarks.bench.commands, gradfree.benchmarks.suites.index")
    assert "torch" in modules
    assert modules.isdisjoint(("datasets", "lightning", "pandas", "polars", "sklearn", "torchmetrics", "transformers"))


ASKED = """
import torch

def asked(*_):
    raise SystemExit("asked for a device")

torch.accelerator.is_available = torch.cuda.is_available = torch.cuda.device_count = asked
from importlib import import_module
from gradfree.benchmarks.running.workers import PRELOADED
for name in PRELOADED:
    import_module(name)
"""


@pytest.mark.slow
def test_what_cases_are_forked_with_has_not_asked_for_a_device():
    """CUDA refuses to work in a process that is forked afterwards. Some versions of torch ask in the second module."""
    modules = loaded(ASKED)
    assert "gradfree.benchmarks.suites.index" in modules
    assert "torch.utils.benchmark" not in modules


def test_every_room_is_installed():
    """pyproject.toml lists all packages: setuptools does not find those whose folder has another name."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    rooms = {name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in MODULES.items()}
    assert listed == sorted(rooms), "list the folders in pyproject.toml, [tool.setuptools] packages, in order"


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_no_file_is_long(folder):
    """A file has one subject and at most 400 lines."""
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert len(lengths) > 5
    assert not {path: length for path, length in lengths.items() if length > 400}, "make two files, a subject each"


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_no_room_is_crowded(folder):
    """A folder has at most twenty files; make another folder for those that belong together.

    ``algorithms/`` has one file for each engine, however many there are.
    """
    rooms = Counter(str(path.parent) for path in (ROOT / folder).rglob("*.py"))
    assert rooms
    rooms.pop(str(ROOT / "algorithms"), None)
    crowded = {room: files for room, files in rooms.items() if files > 20}
    assert not crowded, "make a folder for files that belong together, and list it in pyproject.toml"


def test_no_two_public_classes_share_a_name():
    trees = {name: parsed(path) for name, path in MODULES.items()}
    homes = [(node.name, name) for name, tree in trees.items() for node in tree.body if isinstance(node, ast.ClassDef)]
    taken = Counter(name for name, _ in homes if not name.startswith("_"))
    assert sum(taken.values()) > 100
    assert not [home for home in homes if taken[home[0]] > 1]


def private_functions(path):
    """Yield the private names of torch that a file uses: with an underscore, except classes."""
    for node in ast.walk(parsed(path)):
        names = []
        if isinstance(node, ast.Attribute):
            names = ast.unparse(node).split(".")
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch."):
            names = ["torch", *(alias.name for alias in node.names)]
        if names[:1] == ["torch"] and any(re.match("_[a-zC]", name) for name in names) and "ops" not in names:
            yield ".".join(names)


def test_private_names_of_torch_are_used_in_one_file():
    """In that file each has a fallback, and ``tests/torchside/test_private.py`` tests it."""
    core = ROOT / "gradfree"
    taken = {str(path.relative_to(core)): sorted(private_functions(path)) for path in core.rglob("*.py")}
    taken.pop("torchside/private.py")
    assert not {path: names for path, names in taken.items() if names and not path.startswith("testing")}


def test_only_the_file_of_the_hardware_names_an_accelerator():
    accelerators = {"cuda", "mps", "xpu", "hip", "mtia", "npu"}
    core = {name: path for name, path in MODULES.items() if not name.startswith("gradfree.benchmarks")}
    said = {
        name
        for name, path in core.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and node.value in accelerators
    }
    assert said == {"gradfree.devices.hardware"}
