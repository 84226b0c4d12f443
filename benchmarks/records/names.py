"""The names that functions and classes have in records: data of their own, which no move of a file changes."""

from __future__ import annotations

from typing import Any

_OURS = "gradfree"

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
    "last_accuracy": "LastAccuracy",
    "recall_accuracy": "gradfree.benchmarks.tasks.RecallAccuracy",
}
"""What functions of ours are called in records from before they had names without a file. Never to be changed."""

_UNNAMED = {
    "AdamTask",
    "Builder",
    "ConstantSGDTask",
    "Images",
    "Imported",
    "LabelledImages",
    "Loaded",
    "LossMetric",
    "Network",
    "Operands",
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
    """Return what a function or class is called in records: of ours by itself, of others with its module."""
    if _is_ours(thing):
        return _FROZEN.get(thing.__qualname__, thing.__qualname__)
    return f"{thing.__module__}.{thing.__qualname__}"


def recorded_class(kind: type) -> dict[str, str]:
    """Return the entry that tells a class's fields in a record from those of another class."""
    return {} if _is_ours(kind) and kind.__qualname__ in _UNNAMED else {"class": recorded_name(kind)}


def _is_ours(thing: Any) -> bool:
    return bool(thing.__module__.partition(".")[0] == _OURS)
