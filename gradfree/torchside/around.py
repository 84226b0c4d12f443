"""What lies around a call: a checkpoint, or what is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo

_P = ParamSpec("_P")
_T = TypeVar("_T")


def recomputed() -> bool:
    """Tell whether a checkpoint, ``use_reentrant=False``, is running its function again in a backward pass."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and "_recomputation_hook" in getattr(top[0], "__qualname__", "")


def checkpointed() -> bool:
    """Tell whether a checkpoint, ``use_reentrant=False``, is running its function for the first time."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and "_checkpoint_hook" in getattr(top[0], "__qualname__", "")


def _callback_is_owned() -> bool:
    before = sys.getrefcount(None)
    for _ in range(100):
        get_eval_frame_callback()
    return sys.getrefcount(None) > before - 50


_MAY_ASK = _callback_is_owned()
"""Some versions of torch return ``None`` without owning it: asked often enough, Python ends."""


def is_compiled_around() -> bool:
    """Tell whether the caller's frame is compiled, or lies in what is; or may be, where torch must not be asked."""
    return torch.compiler.is_dynamo_compiling() or not _MAY_ASK or get_eval_frame_callback() is not None


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Do as ``torch.compiler.disable``, which imports the compiler, and takes as long as a small layer each time."""
    disabled = _disable_dynamo(function)

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return disabled(*args, **kwargs) if is_compiled_around() else function(*args, **kwargs)

    return called
