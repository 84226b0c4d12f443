"""Names of functions and classes in records, which stay the same when a file is moved."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_OURS = "gradfree"
_INSTALLED = {"site-packages", "dist-packages"}

_FROZEN = {
    "digits": "gradfree.benchmarks.data.digits",
    "pydoc": "gradfree.benchmarks.data.pydoc",
    "squared_error": "gradfree.benchmarks.own.squared_error",
    "adding_pixels": "gradfree.benchmarks.synthetic.adding_pixels",
    "copying": "gradfree.benchmarks.synthetic.copying",
    "parity_pixels": "gradfree.benchmarks.synthetic.parity_pixels",
    "cross_entropy": "gradfree.benchmarks.tasks.cross_entropy",
    "digit_accuracy": "gradfree.benchmarks.tasks.digit_accuracy",
    "parity_accuracy": "gradfree.benchmarks.tasks.parity_accuracy",
    "accuracy": "gradfree.benchmarks.own.Accuracy",
    "mean_squared_error": "torchmetrics.regression.mse.MeanSquaredError",
    "perplexity": "torchmetrics.text.perplexity.Perplexity",
    "recall_accuracy": "gradfree.benchmarks.tasks.RecallAccuracy",
}
"""Names of our functions that old records contain with a module path. Must never change."""

_UNNAMED = {
    "AdamTask",
    "ConstantSGDTask",
    "Images",
    "Imported",
    "Loaded",
    "LossMetric",
    "Network",
    "RecurrentLayer",
    "RecurrentNet",
    "Row",
    "SGDTask",
    "Score",
    "Synthetic",
    "Task",
    "Text",
}
"""Our classes whose names are not in records, because the first records had none. Add none; if a class is renamed,
rename it here."""


def recorded_name(thing: Any) -> str:
    """Return the name of a function or class in records: our own without a module, others with it.

    The user's code, which is neither installed nor in the standard library, also gets a digest of its files.
    """
    if _is_ours(thing):
        return _FROZEN.get(thing.__qualname__, thing.__qualname__)
    own = "" if _is_installed(thing.__module__) else source_digest(thing.__module__)
    return f"{thing.__module__}.{thing.__qualname__}" + (f" @{own}" if own else "")


def recorded_class(kind: type) -> dict[str, str]:
    """Return the entry with a class's name for its fields in a record; empty for the classes in ``_UNNAMED``."""
    return {} if _is_ours(kind) and kind.__qualname__ in _UNNAMED else {"class": recorded_name(kind)}


def recorded_source(kind: type) -> dict[str, str]:
    """Return the entry with the digest of a class's files; empty for our own classes."""
    return {} if _is_ours(kind) else {"source": source_digest(kind.__module__)}


def without_sources(config: Any) -> str:
    """Return ``config`` as JSON, without the digests of the user's code."""
    return re.sub(r' @[0-9a-f]{8}(?=")|(?<="source": ")[0-9a-f]{8}(?=")', "", json.dumps(config, sort_keys=True))


@cache
def source_digest(module: str) -> str:
    """Return a digest of a module's source: its file or package, and the files beside it that it mentions.

    Modules and packages in the same folder count if a file that counts contains their name. Other folders, installed
    packages and imports by computed names do not count. Empty for a module without a file.
    """
    place = _place(module)
    if place is None:
        return ""
    top, root = module.partition(".")[0], place.parent
    beside = set() if _is_installed(module) else {path.stem for path in root.iterdir() if path.suffix in ("", ".py")}
    digest, seen, waiting = hashlib.sha256(), set[str](), {top}
    while waiting:
        seen.add(name := min(waiting))
        for file in sorted({place if name == top else root / f"{name}.py", *(root / name).rglob("*.py")}):
            if file.is_file():
                text = file.read_bytes()
                digest.update(f"{file.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
                waiting |= beside & set(re.findall(r"\w+", text.decode(errors="replace")))
        waiting -= seen
    return digest.hexdigest()[:8]


def _is_installed(module: str) -> bool:
    """Return whether a module is installed or in the standard library."""
    place = _place(module)
    return module.partition(".")[0] in sys.stdlib_module_names or bool(
        place and _INSTALLED & set(place.resolve().parts)
    )


def _place(module: str) -> Path | None:
    """Return the file of the top-level module, or the folder of the top-level package."""
    try:
        found = find_spec(module.partition(".")[0])
    except ValueError:
        return None
    places = [*(found.submodule_search_locations or []), found.origin or ""] if found else []
    return next((Path(place) for place in places if place and Path(place).exists()), None)


def _is_ours(thing: Any) -> bool:
    return bool(thing.__module__.partition(".")[0] == _OURS)
