"""Imports run one way and in no circle, rooms and files stay small, the core needs torch and numpy alone.

The order of the rooms is held by import-linter's contracts in pyproject.toml (``make lint``).
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter

import pytest
from places import PACKAGES, ROOT

from gradfree.checkout import tomllib

# What the core may import besides itself and the standard library. Triton comes with torch's builds for GPUs.
ALLOWED = {"gradfree", "numpy", "tomli", "torch", "triton"}
# The doors to what the extras bring.
DOORS = (
    "gradfree/command_parser.py",
    "gradfree/huggingface/",
    "gradfree/lightning/",
    "gradfree/testing/",
    "benchmarks/",
)


def modules():
    """Full names of all modules of the package, as installed, with their files; scripts and other programs are not."""
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
    """Full names of what the module at ``path`` imports: at its head, in a function, or for annotations alone."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in inner)


def test_no_circle():
    """Modules can be put in an order in which each imports only earlier ones; ``prepare`` names a circle otherwise."""
    graph = {name: set(imports(path)) & MODULES.keys() for name, path in MODULES.items()}
    assert sum(map(len, graph.values())) > 500
    TopologicalSorter(graph).prepare()


def test_the_core_imports_torch_and_numpy_alone():
    allowed = ALLOWED | sys.stdlib_module_names
    files = {str(path.relative_to(ROOT)): path for path in MODULES.values()}
    core = {name: path for name, path in files.items() if not name.startswith(DOORS)}
    assert len(core) > 70
    tops = {(name, full.partition(".")[0]) for name, path in core.items() for full in imports(path)}
    assert not {(name, top) for name, top in tops if top not in allowed}


STEP = """
import gradfree, torch
chain = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()) for _ in range(4)))
with gradfree.create_engine("fixed_point", iterations=1).attach(torch.nn.Sequential(chain)) as handle:
    chain(torch.randn(2, 3)).sum().backward()
assert chain[0][0].weight.grad is not None
"""


def loaded(code):
    """Names of the modules that are loaded once ``code`` has run."""
    code = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_gradfree_is_quick_to_import_and_to_begin():
    """It imports nothing of what the extras bring; nor does a step, or torch's compiler, which takes seconds."""
    modules = loaded(STEP)
    assert {"gradfree", "torch"} <= modules
    assert modules.isdisjoint(
        ("lightning", "pytorch_lightning", "torchmetrics", "transformers", "jsonargparse", "matplotlib", "scipy")
    )
    assert "torch._dynamo" not in modules


@pytest.mark.slow
def test_commands_start_quickly():
    """Suites are put together without what takes seconds to import; whoever uses that imports it."""
    modules = loaded("import gradfree.benchmarks.bench.commands, gradfree.benchmarks.suites.index")
    assert "torch" in modules
    assert modules.isdisjoint(("datasets", "lightning", "pandas", "polars", "sklearn", "torchmetrics", "transformers"))


def test_every_room_is_installed():
    """pyproject.toml lists the packages, as setuptools finds none whose folder has another name."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    rooms = {name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in MODULES.items()}
    assert listed == sorted(rooms)


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_no_file_is_long(folder):
    """A file has one subject; none needs more than 400 lines for it."""
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert len(lengths) > 5
    assert not {path: length for path, length in lengths.items() if length > 400}


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_no_room_is_crowded(folder):
    """A listing of a room shows what it is for: at most a dozen files."""
    rooms = Counter(str(path.parent) for path in (ROOT / folder).rglob("*.py"))
    assert rooms
    assert not {room: files for room, files in rooms.items() if files > 12}


def test_no_two_public_classes_share_a_name():
    trees = {name: parsed(path) for name, path in MODULES.items()}
    homes = [(node.name, name) for name, tree in trees.items() for node in tree.body if isinstance(node, ast.ClassDef)]
    taken = Counter(name for name, _ in homes if not name.startswith("_"))
    assert sum(taken.values()) > 100
    assert not [home for home in homes if taken[home[0]] > 1]


def private_functions(path):
    """What a file takes from torch that torch does not promise to keep: names with an underscore, no classes."""
    for node in ast.walk(parsed(path)):
        names = []
        if isinstance(node, ast.Attribute):
            names = ast.unparse(node).split(".")
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch."):
            names = ["torch", *(alias.name for alias in node.names)]
        if names[:1] == ["torch"] and any(re.match("_[a-zC]", name) for name in names) and "ops" not in names:
            yield ".".join(names)


def test_what_torch_does_not_promise_is_taken_in_one_file():
    """There each has what happens without it, and ``tests/torchside/test_private.py`` takes it away."""
    core = ROOT / "gradfree"
    taken = {str(path.relative_to(core)): sorted(private_functions(path)) for path in core.rglob("*.py")}
    taken.pop("torchside/private.py")
    assert not {path: names for path, names in taken.items() if names and not path.startswith("testing")}
