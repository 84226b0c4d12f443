"""Problems that any kind of chain may have: an engine already attached, hooks, functions that hide parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from gradfree import errors
from gradfree.chains.site import Site
from gradfree.torchside.graph import Reached, foreign_functions
from gradfree.torchside.private import global_hooks


def problems_of_attached(path: str, module: nn.Module, kinds: Sequence[type[Site]]) -> Iterator[str]:
    """Yield a problem for each module inside ``module``, at ``path``, that has an engine on a chain of ``kinds``."""
    for where, inner in module.named_modules(prefix=path):
        if any(kind.attachment_on(inner) for kind in kinds):
            yield errors.ATTACHED.message(path=where or "the model")


def problems_of_backward_hooks(inside: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a problem for each of the modules ``inside`` a chain, by path, that has backward hooks."""
    for path, module in inside.items():
        if module._backward_hooks or module._backward_pre_hooks:
            yield errors.BACKWARD_HOOKS.message(path=path)


def problems_of_forward_hooks(inside: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a problem for each of the modules ``inside`` a cell, by path, that has forward hooks, or global hooks."""
    for path, module in inside.items():
        if module._forward_hooks:
            yield errors.FORWARD_HOOKS.message(path=path)
    if inside and global_hooks():
        yield errors.GLOBAL_HOOKS.message(path=next(iter(inside)))


def problem_of_hidden_parameters(
    path: str, reached: Reached, parameters: Iterable[tuple[str, nn.Parameter]]
) -> str | None:
    """Return a problem if a custom function in a graph may compute gradients of ``parameters`` by itself.

    Args:
        path: of the module that made the graph.
        reached: what the graph leads to.
        parameters: those that the module may use, with their names.
    """
    functions = foreign_functions(reached.kinds)
    if not functions:
        return None
    leaves = set(map(id, reached.leaves))
    for name, p in parameters:
        if id(p) not in leaves:
            return errors.HIDDEN_PARAMETER.message(path=path, function=functions[0], name=name)
    return None
