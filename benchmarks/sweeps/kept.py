"""A sweep in the folder of its records: what it was, so that it can be reported on without being named again."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradfree.benchmarks.sweeps.axes import Sweep
from gradfree.cli import UsageError

_FILE = "sweep.json"


@dataclass(frozen=True)
class KeptSweep:
    """What a sweep is made of.

    Attributes:
        sweep: what was named.
        loader: ``module:function`` of the data, for a model of the user's own.
    """

    sweep: Sweep
    loader: str | None

    @property
    def _content(self) -> dict[str, Any]:
        return {"loader": self.loader, "sweep": {name: getattr(self.sweep, name) for name in self.sweep.named}}

    @property
    def folder(self) -> Path:
        """The folder of its records if none is named: another for another sweep, the same for the same."""
        digest = hashlib.sha256(json.dumps(self._content, sort_keys=True).encode()).hexdigest()[:6]
        names = self.sweep.tasks or self.sweep.model or "sweep"
        words = re.sub(r"[^\w.]+", "-", names if isinstance(names, str) else "-".join(names)).strip("-.")
        return Path("results", f"{words[:40]}-{digest}")

    def keep(self, folder: Path) -> None:
        """Write what it is into ``folder``."""
        (folder / _FILE).write_text(json.dumps(self._content, indent=1), encoding="utf-8")

    @classmethod
    def of(cls, folder: Path) -> KeptSweep | None:
        """Return the sweep that was kept in ``folder``; ``None`` if none was.

        Raises:
            UsageError: the file is damaged.
        """
        file = folder / _FILE
        if not file.exists():
            return None
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return cls(Sweep(**content["sweep"]), content["loader"])
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{file} is no sweep: {error}.") from error
