"""Restores a model after passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from gradfree.torchside.random_state import RandomState
from gradfree.torchside.restoring import restored_tensors

_INNER = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
"""Parameters, buffers, submodules and hooks of a module."""


@contextmanager
def left_intact(model: nn.Module) -> Iterator[None]:
    """Restore ``model`` and all random states after the ``with``.

    Restored are the values of parameters and buffers (also of replaced ones), the attributes and hooks of modules, and
    the random states of Python, numpy and torch on every device with parameters. The contents of other attributes are
    not: a list that a pass appends to stays longer. Other effects of hooks remain.
    """
    modules = [
        (module, dict(vars(module)), [dict(vars(module)[name]) for name in _INNER]) for module in model.modules()
    ]
    tensors = [own for module in model.modules() for own in (module._parameters, module._buffers)]
    with RandomState(*(p.device for p in model.parameters())).restored(), restored_tensors(tensors):
        try:
            yield
        finally:
            for module, attributes, inner in modules:
                vars(module).clear()
                vars(module).update(attributes)
                for name, entries in zip(_INNER, inner, strict=True):
                    vars(module)[name].clear()
                    vars(module)[name].update(entries)
