"""Problems that any kind of chain may have: an engine already attached, backward hooks, large Jacobians."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from gradfree import errors
from gradfree.chains.site import Site
from gradfree.errors import ChainError
from gradfree.torchside.private import global_hooks


def attached(path: str, module: nn.Module, kinds: Sequence[type[Site]]) -> Iterator[str]:
    """Yield a problem for each module inside ``module``, at ``path``, that has an engine on a chain of ``kinds``."""
    for where, inner in module.named_modules(prefix=path):
        if any(kind.holds_engine(inner) for kind in kinds):
            yield errors.ATTACHED.message(path=where or "the model")


def hooked(inside: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a problem for each of the modules ``inside`` a chain, by path, that has backward hooks."""
    for path, module in inside.items():
        if module._backward_hooks or module._backward_pre_hooks:
            yield errors.BACKWARD_HOOKS.message(path=path)


def tapped(inside: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a problem for each of the modules ``inside`` a cell, by path, that has forward hooks, or global hooks."""
    for path, module in inside.items():
        if module._forward_hooks:
            yield errors.FORWARD_HOOKS.message(path=path)
    if inside and global_hooks("forward", "backward", "backward_pre"):
        yield errors.GLOBAL_HOOKS.message(path=next(iter(inside)))


def refuse_large_jacobians(engine: str, path: str, links: int, state: Tensor, limit: float, remedy: str) -> None:
    """Raise if dense Jacobians need more than ``limit`` GiB.

    Args:
        engine: its name.
        path: of the chain.
        links: L, the number of Jacobians for each sample.
        state: one state, (B, H), in the dtype of the Jacobians.
        limit: in GiB.
        remedy: another engine or option, for the message.

    Raises:
        ChainError: they need more.
    """
    batch, width = state.shape
    # The Jacobians and the products of two consecutive rounds of the reduction: nearly as many each.
    size = 3 * links * batch * width * width * state.element_size() / 2**30
    if size > limit:
        raise ChainError(
            f"{engine} would need {size:.3g} GiB for {path!r}: {links} links of {batch} samples with dense "
            f"Jacobians of {width} x {width} in {state.dtype}, and their products; memory_limit is "
            f"{limit:g}. Raise it, take smaller batches or narrower states, or use {remedy}."
        )
