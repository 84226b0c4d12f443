"""Functions of torch that ``torch.func.vmap`` computes wrongly, in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

_WRONG = ("select_scatter", "as_strided", "as_strided_", "as_strided_copy", "linear_cross_entropy")
"""In torch 2.13: gradients of the first and last, values of the others, which use strides of the batch."""


def wrong_under_vmap(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of the called function if vmap computes it wrongly; ``None`` for all others."""
    name = str(getattr(function, "__name__", "")).partition(".")[0]  # Of an overload: select_scatter.default.
    # Values of index_fill are wrong if only the value is a batch.
    filled = name == "index_fill" and isinstance([*args, *kwargs.values()][-1], Tensor)
    return name if filled or name in _WRONG else None


class WrongUnderVmap(TorchFunctionMode):
    """Notes in ``called`` the name of a function that vmap computes wrongly; ``None``: none was called."""

    called: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called = wrong_under_vmap(func, args, kwargs or {}) or self.called
        return func(*args, **(kwargs or {}))
