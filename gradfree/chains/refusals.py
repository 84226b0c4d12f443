"""Problems that any kind of chain may have: an engine that is there already, backward hooks, large Jacobians."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from gradfree import errors
from gradfree.chains.site import Site
from gradfree.errors import ChainError
from gradfree.torchside.private import global_hooks


def attached(path: str, module: nn.Module, kinds: Sequence[type[Site]]) -> Iterator[str]:
    """Yield a problem for each module inside ``module``, at ``path``, that an engine is on in a chain of ``kinds``."""
    for where, inner in module.named_modules(prefix=path):
        if any(kind.holds_engine(inner) for kind in kinds):
            yield errors.ATTACHED.message(path=where or "the model")


def hooked(inside: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a problem for each of the modules ``inside`` a chain, by path, that has backward hooks."""
    for path, module in inside.items():
        if module._backward_hooks or module._backward_pre_hooks:
            yield errors.BACKWARD_HOOKS.message(path=path)


def tapped(inside: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a problem for each of the modules ``inside`` a cell, by path, that forward hooks or global ones look at."""
    for path, module in inside.items():
        if module._forward_hooks:
            yield errors.FORWARD_HOOKS.message(path=path)
    if inside and global_hooks("forward", "backward", "backward_pre"):
        yield errors.GLOBAL_HOOKS.message(path=next(iter(inside)))


def refuse_large_jacobians(engine: str, path: str, links: int, state: Tensor, limit: float, remedy: str) -> None:
    """Refuse dense Jacobians that need more than ``limit`` GiB.

    Args:
        engine: that would need them.
        path: of the chain.
        links: L, the number of Jacobians for each sample.
        state: one, (B, H), in the dtype in which it is computed with.
        limit: in GiB.
        remedy: another engine or option that needs none.

    Raises:
        ChainError: they do.
    """
    batch, width = state.shape
    # The Jacobians, what a round has made of them, and what the next makes of that: nearly as many each.
    size = 3 * links * batch * width * width * state.element_size() / 2**30
    if size > limit:
        raise ChainError(
            f"{engine} would need {size:.3g} GiB for {path!r}: {links} links of {batch} samples with dense "
            f"Jacobians of {width} x {width} in {state.dtype}, and their products; memory_limit is "
            f"{limit:g}. Raise it, take smaller batches or narrower states, or use {remedy}."
        )
