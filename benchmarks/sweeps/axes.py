"""What can be named on the command line, or in a file, to be swept over; light to import."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

Names = dict[str, Any] | list[str] | str | None
"""Names: one, several separated by commas, a list, or each with its options."""
Paths = list[str] | str | None
"""Module paths: one, several separated by commas, or a list."""
Numbers = list[float] | float | str | None
Counts = list[int] | int | str | None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Engines compared in every combination of what is named; whatever is not named is each task's own.

    Attributes:
        engines: to compare with plain backprop: names separated by commas, or with options, each a value or a list of
            values to combine: '{highway_bp: {iterations: [0, 2], gamma: 0.2}}'. "all" for all that the model allows.
        tasks: names separated by commas, or folders of images or text, ./my_texts, with options if need be.
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
        chains: module paths of the chains, separated by commas, if they cannot be found without help.
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


def listed(names: Paths) -> list[str]:
    """Return the names one by one."""
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names or []
