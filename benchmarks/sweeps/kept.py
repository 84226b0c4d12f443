"""A run in the folder of its records: what it was, so that it can be reported on without being named again."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradfree.benchmarks.sweeps.axes import Sweep
from gradfree.cli import UsageError

_FILE = "run.json"


@dataclass(frozen=True)
class KeptRun:
    """What a run was told.

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
