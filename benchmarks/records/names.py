"""The names that functions and classes have in records: data of their own, which no move of a file changes."""

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
    "padded_perplexity": "gradfree.benchmarks.dsf_texts.padded_perplexity",
    "fine_accuracy": "gradfree.benchmarks.foton_depth.fine_accuracy",
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
"""What functions of ours are called in records from before they had names without a file. Never to be changed."""

_UNNAMED = {
    "AdamTask",
    "Builder",
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
    "Sentences",
    "StagedAdamTask",
    "Synthetic",
    "Task",
    "Text",
}
"""Classes of ours whose fields were in records before their names were. Never to be added to; who renames one
renames it here."""


def recorded_name(thing: Any) -> str:
    """Return what a function or class is called in records: of ours by itself, of others with its module.

    Of the user's own, what is neither installed nor of the standard library, also by the state of its files.
    """
    if _is_ours(thing):
        return _FROZEN.get(thing.__qualname__, thing.__qualname__)
    own = "" if _is_installed(thing.__module__) else source_digest(thing.__module__)
    return f"{thing.__module__}.{thing.__qualname__}" + (f" @{own}" if own else "")


def recorded_class(kind: type) -> dict[str, str]:
    """Return the entry that tells a class's fields in a record from those of another class."""
    return {} if _is_ours(kind) and kind.__qualname__ in _UNNAMED else {"class": recorded_name(kind)}


def recorded_source(kind: type) -> dict[str, str]:
    """Return the entry with the state of the files of a class that is not ours, installed or not."""
    return {} if _is_ours(kind) else {"source": source_digest(kind.__module__)}


def without_sources(config: Any) -> str:
    """Return what a case depends on but code of the user's own, as JSON."""
    return re.sub(r' @[0-9a-f]{8}(?=")|(?<="source": ")[0-9a-f]{8}(?=")', "", json.dumps(config, sort_keys=True))


@cache
def source_digest(module: str) -> str:
    """Return a digest of the files that a module comes from: its own or its package's, and those beside it.

    Of what lies beside it, modules and packages that its files name count, and what these name. Other folders,
    installed packages and what is imported by a name that is put together at run time do not. Nothing for a module
    without a file.
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
    """Tell whether a module is a package's that was installed, or of the standard library."""
    place = _place(module)
    return module.partition(".")[0] in sys.stdlib_module_names or bool(
        place and _INSTALLED & set(place.resolve().parts)
    )


def _place(module: str) -> Path | None:
    """Return the file of the top-level module, or the folder of the package."""
    try:
        found = find_spec(module.partition(".")[0])
    except ValueError:
        return None
    places = [*(found.submodule_search_locations or []), found.origin or ""] if found else []
    return next((Path(place) for place in places if place and Path(place).exists()), None)


def _is_ours(thing: Any) -> bool:
    return bool(thing.__module__.partition(".")[0] == _OURS)
