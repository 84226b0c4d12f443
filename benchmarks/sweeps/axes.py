"""The options of a sweep, and the file that stores them with the records; light to import."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gradfree.cli import UsageError

Names = dict[str, Any] | list[Any] | str | None
"""One name, several separated by commas, a list, or a mapping from names to options."""
Paths = list[Any] | str | None
"""One module path, several separated by commas, or a list; a list in the list has the blocks of one chain."""
Numbers = list[float] | float | str | None
Counts = list[int] | int | str | None
_FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A comparison of engines for every combination of the given values; the task decides what is not given.

    Attributes:
        engines: engines to compare with autograd: names separated by commas, or with options, each a value or a list
            of values to combine: '{highway_bp: {iterations: [0, 2], gamma: 0.2}}'. "all": all that the model allows.
        tasks: names separated by commas.
        model: instead of tasks, your own model: module:function, which returns it, maybe with options like engines; and
            --data is a module:function, which returns the examples.
        batch_size: examples a step; like all numbers here, several are separated by commas.
        length: length of the sequences.
        depth: number of blocks or layers of the models.
        dtype: dtype of weights and inputs: float32, float64, bfloat16.
        learning_rates: each engine is trained at the one with the best validation score, tried with another seed.
        steps: steps of each training run.
        loss: for your own data: module:function, called with outputs and targets. By default, cross-entropy for
            integer targets and the squared error for others.
        score: for your own data: module:function, called with outputs and targets; higher is better. By default, the
            accuracy for integer targets, and the loss for others and with --loss.
        chains: module paths of the chains, separated by commas, if they are not found automatically; for blocks that
            are attributes of one module a list in the list: '[[block1, block2]]'.
        target: validation score; the time to reach it is reported, too.
    """

    engines: Names = None
    tasks: Names = None
    model: Names = None
    batch_size: Counts = None
    length: Counts = None
    depth: Counts = None
    dtype: Names = None
    learning_rates: Numbers = None
    steps: int | None = None
    loss: str | None = None
    score: str | None = None
    chains: Paths = None
    target: float | None = None

    @property
    def named(self) -> list[str]:
        """The names of the options that are given."""
        return [f.name for f in fields(self) if getattr(self, f.name) is not None]


def listed(names: Paths) -> list[Any]:
    """Return the names as a list."""
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names or []


def chain_paths(chains: Paths) -> list[Any] | None:
    """Return the module paths of chains, ``None`` if none is given; YAML reads the names of a Sequential as numbers."""
    return [[str(path) for path in one] if isinstance(one, list) else str(one) for one in listed(chains)] or None


@dataclass(frozen=True)
class RunRequest:
    """The request of a run, stored beside its records.

    Attributes:
        sweep: the sweep's options.
        loader: ``module:function`` that returns the data, for the user's own model.
        suite: name of the suite, if no sweep is given.
        command: the last command that worked on it.
    """

    sweep: Sweep
    loader: str | None = None
    suite: str | None = None
    command: str = ""

    @property
    def _swept(self) -> dict[str, Any]:
        return {"loader": self.loader, "sweep": {name: getattr(self.sweep, name) for name in self.sweep.named}}

    @property
    def folder(self) -> Path:
        """The default folder of its records; equal sweeps have equal folders, others do not."""
        if self.suite:
            return Path("results", self.suite.replace(":", "-"))
        digest = hashlib.sha256(json.dumps(self._swept, sort_keys=True).encode()).hexdigest()[:6]
        names = self.sweep.tasks or self.sweep.model or "sweep"
        words = re.sub(r"[^\w.]+", "-", names if isinstance(names, str) else "-".join(map(str, names))).strip("-.")
        return Path("results", f"{words[:40]}-{digest}")

    def save(self, folder: Path) -> None:
        """Write the request to ``folder``, which is made if it does not exist.

        Raises:
            UsageError: it cannot be made or written to.
        """
        content = {"command": self.command, "suite": self.suite, **self._swept}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot make the folder {folder}, or write to it: {error.strerror}.") from error

    @classmethod
    def load(cls, folder: Path) -> RunRequest | None:
        """Return the request stored in ``folder``; ``None`` if there is none.

        Raises:
            UsageError: the file is damaged.
        """
        file = folder / _FILE
        if not file.exists():
            return None
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            sweep = Sweep(**content.pop("sweep"))
            return cls(sweep, content["loader"], content["suite"], content["command"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{file} is not the file of a run: {error}.") from error


def command_of(flags: dict[str, Any]) -> str:
    """Return the command ``gradfree bench run`` with these flags; flags without a value are omitted."""
    words = [
        (f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value))
        for name, value in flags.items()
        if value is not None
    ]
    return shlex.join(["gradfree", "bench", "run", *(word for pair in words for word in pair)])
