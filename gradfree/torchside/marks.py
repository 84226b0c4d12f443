"""Telling whether values are still what they were."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

Marks = list[tuple[object, int]]
"""What tells whether values are still the same: their identities, of tensors also the counts of changes in place."""


def marks_of(values: Iterable[object]) -> Marks:
    """Return marks of what ``values`` are now."""
    return [
        (weakref.ref(v), 0 if v.is_inference() else v._version) if isinstance(v, Tensor) else (v, 0) for v in values
    ]


def unchanged(marks: Marks, others: Marks) -> bool:
    """Tell whether two marks are of the same values."""
    return len(marks) == len(others) and all(a is b and m == n for (a, m), (b, n) in zip(marks, others, strict=True))


def held_marks(cell: nn.Module) -> Marks:
    """Return marks of what the cell's output may depend on besides its arguments and parameters."""
    values = [value for module in cell.modules() for value in vars(module).values()]
    parts = [part for value in values for part in (value.values() if isinstance(value, dict) else [value])]
    return marks_of(part for part in parts if not isinstance(part, nn.Parameter))
