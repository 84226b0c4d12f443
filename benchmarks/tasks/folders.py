"""Tasks on a folder of the user's own: images with their classes, or text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradfree.benchmarks.data.digests import folder_digest
from gradfree.benchmarks.data.images import LabelledImages
from gradfree.benchmarks.data.stored import open_set
from gradfree.benchmarks.data.text import UNITS, Text
from gradfree.benchmarks.tasks.metrics import accuracy, perplexity
from gradfree.benchmarks.tasks.task import Score, Task
from gradfree.cli import UsageError
from gradfree.wording import no_such

if TYPE_CHECKING:
    from datasets import DatasetDict

_IMAGE_OPTIONS = ("column", "label", "side")
_TEXT_OPTIONS: Mapping[str, Any] = {"unit": "character", "vocabulary": 256, "length": 128, "held_out": 1000}
_FEWEST_ROWS = 10
"""Of which a tenth can be held out."""


def is_folder(name: str) -> bool:
    """Tell whether ``name`` is a folder's, not a task's."""
    return "/" in name or os.sep in name


def folder_task(path: str, options: Mapping[str, Any]) -> Task:
    """Return the training of a small model on what a folder has, in whatever files ``datasets`` reads.

    Args:
        path: of the folder.
        options: of images ``column`` and ``label``, the columns with images and classes, and ``side``, that of the
            squares they are scaled to; of text ``column``, and
            ``unit``, ``vocabulary``, ``length`` and ``held_out`` as :class:`Text` has them. Columns that are the only
            ones of their kind need not be named.

    Raises:
        UsageError: the folder cannot be read, has neither images nor text, or not with these options.
    """
    import datasets

    if not Path(path).is_dir() or Path(path).resolve() == Path(path).resolve().parent:
        raise UsageError(f"there is no folder {path} of examples.")
    digest = folder_digest(Path(path))
    splits = _open(path, digest)
    images = [name for name, feature in splits["train"].features.items() if isinstance(feature, datasets.Image)]
    texts, numbers = _columns(splits, "string"), _columns(splits, "int")
    if not images and not texts:
        listed = ", ".join(f"{name} ({feature})" for name, feature in splits["train"].features.items())
        raise UsageError(f"{path} has neither images nor text, but the columns {listed}.")
    known = _IMAGE_OPTIONS if images else ("column", *_TEXT_OPTIONS)
    for option in options:
        if option not in known:
            raise UsageError(no_such(f"option of {path}", option, known))
    column = _chosen(options.get("column"), images or texts, "column", path)
    if images:
        label = _chosen(options.get("label"), numbers, "label", path)
        return _of_images(path, LabelledImages(path, column, label=label, side=_side(options, path), files=digest))
    settings = {**_TEXT_OPTIONS, **{name: value for name, value in options.items() if name != "column"}}
    _check(settings, path)
    return _of_text(path, Text(path, column=column, files=digest, **settings))


def _open(path: str, digest: str) -> DatasetDict:
    try:
        splits = open_set(Path(path), digest)
    except Exception as error:
        raise UsageError(f"{path} cannot be read: {_not_text(path) or error.__cause__ or error}") from error
    if "train" not in splits:
        raise UsageError(f"{path} has no split to train on, but {', '.join(splits)}; name a file train.parquet, say.")
    if len(splits) < 3 and len(splits["train"]) < _FEWEST_ROWS:
        raise UsageError(
            f"{path} has {len(splits['train'])} rows to train on, too few to hold out a tenth of them: "
            "add splits for validation and test."
        )
    return splits


def _not_text(path: str) -> str:
    """Return which text file is not UTF-8, if one is not."""
    strange = [file for file in sorted(Path(path).rglob("*.txt")) if not _is_utf8(file)]
    return f"{strange[0]} is not UTF-8" if strange else ""


def _is_utf8(file: Path) -> bool:
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _columns(splits: DatasetDict, kind: str) -> list[str]:
    """Return the columns with a number of ``kind``, or text."""
    features = splits["train"].features.items()
    return [name for name, feature in features if kind in str(getattr(feature, "dtype", ""))]


def _chosen(given: str | None, columns: Sequence[str], option: str, path: str) -> str:
    """Return the column that is given, or the only one that can be meant."""
    if given is not None and given not in columns:
        raise UsageError(f"{path}: {no_such(option, str(given), columns)}")
    if given is None and len(columns) != 1:
        found = f"of {', '.join(columns)}" if columns else "which has whole numbers, and there is none"
        raise UsageError(f"{path}: name the {option}, {found}: --tasks '{{{path}: {{{option}: NAME}}}}'.")
    return given or columns[0]


def _side(options: Mapping[str, Any], path: str) -> int:
    side = options.get("side", 0)
    if isinstance(side, bool) or not isinstance(side, int) or side < 0:
        raise UsageError(f"{path}: side must be a number of pixels, not {side!r}.")
    return side


def _check(settings: Mapping[str, Any], path: str) -> None:
    if settings["unit"] not in UNITS:
        raise UsageError(f"{path}: {no_such('unit', str(settings['unit']), UNITS)}")
    for name in ("vocabulary", "length", "held_out"):
        if not isinstance(settings[name], int) or settings[name] < 1:
            raise UsageError(f"{path}: {name} must be a whole number above 0, not {settings[name]!r}.")


def _name(path: str) -> str:
    return Path(path).resolve().name


def _of_images(path: str, images: LabelledImages) -> Task:
    data = images()
    classes = [split.targets for split in data]
    if min(int(targets.min()) for targets in classes) < 0:
        raise UsageError(f"{path}: {images.label} has negative numbers; classes are counted from 0.")
    return Task(
        name=_name(path),
        data=images,
        model="preact_resnet",
        options={
            "depth": 20,
            "in_channels": data.train.inputs.shape[1],
            "num_classes": 1 + max(int(targets.max()) for targets in classes),
            "width": 16,
        },
        score=Score("accuracy", "%", accuracy, factor=100.0),
        learning_rate=1e-2,
        batch_size=min(64, len(data.train.inputs)),
        steps=500,
    )


def _of_text(path: str, text: Text) -> Task:
    return Task(
        name=_name(path),
        data=text,
        model="recurrent_lm",
        options={"vocab_size": text.vocabulary, "cell": "gru", "layers": 1, "width": 128},
        score=Score("perplexity", f"per {text.unit}", perplexity),
        learning_rate=1e-2,
        batch_size=16,
        steps=500,
    )
