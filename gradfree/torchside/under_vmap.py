"""Functions of torch that ``torch.func.vmap`` computes wrongly, in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WRONG = ("select_scatter", "as_strided", "as_strided_", "as_strided_copy", "linear_cross_entropy")
"""In torch 2.13: gradients of the first and last, values of the others, which use strides of the batch."""


def wrong_under_vmap(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_shared: Callable[[Tensor], bool] = lambda t: True,
) -> str | None:
    """Return the name of the called function if vmap computes it wrongly; ``None`` for all others.

    Args:
        function: of torch.
        args: its arguments.
        kwargs: its keyword arguments.
        is_shared: returns whether a table or an index of embeddings is the same for the whole batch.
    """
    name = str(getattr(function, "__name__", "")).partition(".")[0]  # Of an overload: select_scatter.default.
    given = [*args, *kwargs.values()]
    tensors = [each for each in given if isinstance(each, Tensor)]
    if name == "index_fill":
        is_wrong = isinstance(given[-1], Tensor)  # If only the value is a batch.
    elif name == "roll":
        is_wrong = tensors[0].dim() == 0  # Goes across the batch.
    elif name in ("any", "all"):
        is_wrong = any(isinstance(each, tuple | list) and not each for each in given)  # Not element by element.
    elif name == "embedding":  # Gradients at the padding, if table and indices are batches.
        no_padding = -1 if function is torch.embedding else None
        padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else no_padding)
        is_wrong = padding != no_padding and not any(map(is_shared, tensors))
    else:
        is_wrong = name in _WRONG
    return name if is_wrong else None


class WrongUnderVmap(TorchFunctionMode):
    """Notes in ``called`` the name of a function that vmap computes wrongly; ``None``: none was called."""

    called: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called = wrong_under_vmap(func, args, kwargs or {}) or self.called
        return func(*args, **(kwargs or {}))
