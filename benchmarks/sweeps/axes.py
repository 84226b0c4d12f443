"""What can be named on the command line, or in a file, to be swept over, and what is kept of it; light to import."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gradfree.cli import UsageError

Names = dict[str, Any] | list[str] | str | None
"""Names: one, several separated by commas, a list, or each with its options."""
Paths = list[Any] | str | None
"""Module paths: one, several separated by commas, or a list, in which a list is one chain's blocks."""
Numbers = list[float] | float | str | None
Counts = list[int] | int | str | None
_FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Engines compared in every combination of what is named; whatever is not named is each task's own.

    Attributes:
        engines: to compare with plain backprop: names separated by commas, or with options, each a value or a list of
            values to combine: '{highway_bp: {iterations: [0, 2], gamma: 0.2}}'. "all" for all that the model allows.
        tasks: names separated by commas.
        model: names separated by commas, or with options as those of engines. Or one of your own, module:function,
            which builds it; without --tasks, --data is a module:function too, which returns the examples.
        batch_size: examples a step, separated by commas, as all numbers.
        length: of the sequences.
        depth: of the models: number of blocks or layers.
        dtype: of weights and inputs: float32, float64, bfloat16.
        learning_rates: each engine is trained at the one that does best on validation data, tried with another seed.
        steps: of each training run.
        seconds: of each training run, in place of steps; runs are not beside each other then.
        loss: of data of your own: module:function, called with outputs and targets. If not given, cross-entropy for
            targets of whole numbers and the squared error for others.
        chains: module paths of the chains, separated by commas, if they cannot be found without help; for blocks that
            lie beside each other a list in the list: '[[block1, block2]]'.
        target: validation score; time to reach it is reported beside the time of a step.
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
    seconds: float | None = None
    loss: str | None = None
    chains: Paths = None
    target: float | None = None

    @property
    def named(self) -> list[str]:
        """The options that are given."""
        return [f.name for f in fields(self) if getattr(self, f.name) is not None]


def listed(names: Paths) -> list[Any]:
    """Return the names one by one."""
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names or []


@dataclass(frozen=True)
class KeptRun:
    """What a run was asked for.

    Attributes:
        sweep: what was named.
        loader: ``module:function`` of the data, for a model of the user's own.
        suite: what was run, if no sweep was named.
        name: that the user gave it.
        command: that did it, the last one if it took several.
    """

    sweep: Sweep
    loader: str | None = None
    suite: str | None = None
    name: str | None = None
    command: str = ""

    @property
    def _swept(self) -> dict[str, Any]:
        return {"loader": self.loader, "sweep": {name: getattr(self.sweep, name) for name in self.sweep.named}}

    @property
    def folder(self) -> Path:
        """The folder of its records if none is named: of sweeps another for another, the same for the same."""
        if named := self.name or (self.suite or "").replace(":", "-"):
            return Path("results", named)
        digest = hashlib.sha256(json.dumps(self._swept, sort_keys=True).encode()).hexdigest()[:6]
        names = self.sweep.tasks or self.sweep.model or "sweep"
        words = re.sub(r"[^\w.]+", "-", names if isinstance(names, str) else "-".join(names)).strip("-.")
        return Path("results", f"{words[:40]}-{digest}")

    def keep(self, folder: Path) -> None:
        """Write what it is into ``folder``."""
        content = {"name": self.name, "command": self.command, "suite": self.suite, **self._swept}
        (folder / _FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")

    @classmethod
    def of(cls, folder: Path) -> KeptRun | None:
        """Return the run that was kept in ``folder``; ``None`` if none was.

        Raises:
            UsageError: the file is damaged.
        """
        file = folder / _FILE
        if not file.exists():
            return None
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            sweep = Sweep(**content.pop("sweep"))
            return cls(sweep, **content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{file} is no run: {error}.") from error


def command_of(flags: dict[str, Any]) -> str:
    """Return the ``gradfree bench run`` with these flags, those without a value left out."""
    words = [
        (f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value))
        for name, value in flags.items()
        if value is not None
    ]
    return shlex.join(["gradfree", "bench", "run", *(word for pair in words for word in pair)])
