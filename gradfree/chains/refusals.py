"""Problems that any kind of chain may have: an engine already attached, hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from gradfree import errors
from gradfree.chains.site import Site
from gradfree.torchside.private import global_hooks


def problems_of_attached(path: str, module: nn.Module, kinds: Sequence[type[Site]]) -> Iterator[str]:
    """Yield a problem for each module inside ``module``, at ``path``, that has an engine on a chain of ``kinds``."""
    for where, inner in module.named_modules(prefix=path):
        if any(kind.attachment_on(inner) for kind in kinds):
            yield errors.ATTACHED.message(path=where or "the model")


def problems_of_hooks(inside: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a problem for each of the modules ``inside`` a chain, by path, that has backward hooks."""
    for path, module in inside.items():
        if module._backward_hooks or module._backward_pre_hooks:
            yield errors.BACKWARD_HOOKS.message(path=path)


def problems_of_taps(inside: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a problem for each of the modules ``inside`` a cell, by path, that has forward hooks, or global hooks."""
    for path, module in inside.items():
        if module._forward_hooks:
            yield errors.FORWARD_HOOKS.message(path=path)
    if inside and global_hooks():
        yield errors.GLOBAL_HOOKS.message(path=next(iter(inside)))
