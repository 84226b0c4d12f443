"""Problems that any kind of chain may have: an engine that is there already, backward hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from gradfree.chains.site import Site


def attached(path: str, module: nn.Module, kinds: Sequence[type[Site]]) -> Iterator[str]:
    """Yield a problem for each module inside ``module``, at ``path``, that an engine is on in a chain of ``kinds``."""
    for where, inner in module.named_modules(prefix=path):
        if any(kind.holds_engine(inner) for kind in kinds):
            yield f"{where} has an engine attached already: call detach() on its handle first."


def hooked(inside: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a problem for each of the modules ``inside`` a chain, by path, that has backward hooks."""
    for path, module in inside.items():
        if module._backward_hooks or module._backward_pre_hooks:
            yield (
                f"{path} has full backward hooks: they would see partial cotangents, some of them several times. "
                "Remove them while an engine is attached."
            )
