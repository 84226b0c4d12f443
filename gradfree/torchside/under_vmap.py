"""Functions of torch that ``torch.func.vmap`` computes wrongly, in silence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_WRONG = ("select_scatter", "as_strided", "as_strided_", "as_strided_copy", "linear_cross_entropy")
"""In torch 2.13: gradients of the first and last, values of the others, which use strides of the batch."""


def wrong_under_vmap(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of the called function if vmap computes it wrongly; ``None`` for all others."""
    name = str(getattr(function, "__name__", "")).partition(".")[0]  # Of an overload: select_scatter.default.
    given = [*args, *kwargs.values()]
    if name == "index_fill":
        is_wrong = isinstance(given[-1], Tensor)  # If only the value is a batch.
    elif name == "roll":
        is_wrong = given[0].dim() == 0  # Goes across the batch.
    elif name in ("any", "all"):
        is_wrong = () in given[1:]  # Not element by element.
    elif name == "embedding":
        is_wrong = _padding(args, kwargs) not in (None, -1) and not any(map(_is_weight, given))
    else:
        is_wrong = name in _WRONG
    return name if is_wrong else None


def _padding(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    return kwargs.get("padding_idx", args[2] if len(args) > 2 else None)


def _is_weight(value: Any) -> bool:
    """Return whether a table of embeddings is the same for all samples; gradients at the padding are right then."""
    return isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.requires_grad and value.is_leaf)


class WrongUnderVmap(TorchFunctionMode):
    """Notes in ``called`` the name of a function that vmap computes wrongly; ``None``: none was called."""

    called: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called = wrong_under_vmap(func, args, kwargs or {}) or self.called
        return func(*args, **(kwargs or {}))
