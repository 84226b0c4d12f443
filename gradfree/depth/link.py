"""One block's part of a forward pass, and walks through its graph."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from gradfree.algebra.cotangents import Cotangent, Factor, plus
from gradfree.chains.chain import ChainGradients
from gradfree.errors import ChainError
from gradfree.torchside.graph import was_cast
from gradfree.torchside.hooks import without_hooks
from gradfree.torchside.private import hooks_of, shared_hooks, version
from gradfree.torchside.residual import residual_factor


@dataclass(eq=False)
class Link:
    """One block's part of a forward pass: a graph that ends at the block's own Entry.

    Attributes:
        path: the block's module path.
        block: the block.
        out: the block's output h_i, the root of the graph.
        state: where h_{i-1} enters the graph of ``out``; ``None`` if it does not, or needs no gradient.
        inputs: where other tensors that need a gradient enter it, by their number in the chain.
        parameters: the numbers in the chain of the trainable parameters that the graph leads to.
        root: the node that computed ``out``; ``None`` where the graph is not kept.
        writes: whether a walk through the graph may change the cotangent that it starts from, in place.
        given: the state as the block was given it; ``None`` if it needs no gradient, or was let go of.
        version: how often ``out`` was changed in place when the block returned it.
        after: the state as the model has it, weakly: it leads to its Exit and so to the pass.
        hooks: the gradient hooks on it, which the graph keeps also where the model drops the state.
        extra: what the block has returned besides, as far as it has a gradient; roots of the same graph.
        entries: where anything enters the graph of ``out`` or ``extra``: inputs by number, the state as ``None``.
        in_place: whether the block has changed the state that it was given.
        checkpointed: whether the block lies in a checkpoint, ``use_reentrant=False``.
        end: where the graph ends, if the values of ``out`` have been let go of: it is on the meta device then.
    """

    path: str
    block: nn.Module
    out: Tensor
    state: GradientEdge | None
    inputs: Sequence[tuple[int, GradientEdge]]
    parameters: Sequence[int]
    root: Node | None
    writes: bool
    given: Tensor | None = None
    version: int = 0
    after: weakref.ref[Tensor] | None = None
    hooks: weakref.ref[OrderedDict[int, Any]] | None = None
    extra: Sequence[Tensor] = ()
    entries: Sequence[tuple[int | None, GradientEdge]] = ()
    in_place: bool = False
    checkpointed: bool = False
    end: GradientEdge | None = None

    @property
    def has_changed(self) -> bool:
        """Whether the output has been changed in place since the block returned it."""
        return version(self.out) != self.version

    @property
    def is_shared(self) -> bool:
        """Whether a change of the output is one of the state before it, or of another output."""
        memory = self.out.untyped_storage()._cdata
        others = self.extra if self.given is None else [self.given, *self.extra]
        return any(other.untyped_storage()._cdata == memory for other in others)

    def follow(self, after: Tensor) -> None:
        """Remember the state as the model has it, before anybody has put a hook on it."""
        self.after, self.hooks = weakref.ref(after), weakref.ref(shared_hooks(after))

    @property
    def is_hooked(self) -> bool:
        """Whether anybody sees the gradient of the output: by a hook, or by ``retain_grad()``."""
        if self.after is None or self.hooks is None:
            return False
        after = self.after()
        return bool(self.hooks()) or (after is not None and after.retains_grad)

    @property
    def source(self) -> Tensor | GradientEdge:
        """Where autograd begins to walk through the graph."""
        return self.out if self.end is None else self.end

    @cached_property
    def residual(self) -> Factor:
        """K, read off the graph; only once, as a checkpoint gives out only once what it has computed again."""
        return 0.0 if self.state is None else residual_factor(self.out, self.state, self.checkpointed)

    def changed(self, **fields: Any) -> Link:
        """Return the link with other ``fields``; ``dataclasses.replace`` takes ten times as long."""
        link = object.__new__(Link)
        vars(link).update(vars(self), **fields)
        vars(link).pop("residual", None)
        return link

    def writable(self, delta: Tensor) -> Tensor:
        """Return ``delta`` for the graph to start from, a copy if it must not be changed."""
        return delta.clone() if self.writes else delta


def span(links: Sequence[Link]) -> str:
    """Return what to call links that are walked through from the end."""
    return links[0].path if len(links) == 1 else f"{links[-1].path} to {links[0].path}"


@contextmanager
def walking(where: str, delta: Sequence[Cotangent]) -> Iterator[None]:
    """Say that a failing local backward pass belongs to ``where``; refuse one that has changed its cotangents."""
    versions = [None if d is None else version(d) for d in delta]
    try:
        yield
    except (torch.OutOfMemoryError, ChainError):
        raise
    except RuntimeError as error:
        reason = _FREED if "backward through the graph a second time" in str(error) else str(error)
        raise ChainError(f"the backward pass inside {where} failed: {reason}") from error
    if any(d is not None and version(d) != before for d, before in zip(delta, versions, strict=True)):
        raise ChainError(
            f"a hook on a tensor inside {where} changes its gradient in place, which others read too. Return a new "
            "one: lambda g: g.clamp(-1, 1), not g.clamp_(-1, 1)."
        )


_FREED = (
    "its graph is freed already. A loss on a tensor that a block or a hook has kept from inside has run it, or an "
    "earlier backward pass: call backward(retain_graph=True), return that tensor from the block beside the state, or "
    "use the engine 'backprop'."
)


def has_hooks(state: Tensor) -> bool:
    """Return whether anybody sees the gradient of ``state``."""
    return bool(hooks_of(state)) or state.retains_grad


def check_untouched(link: Link) -> None:
    """Refuse that the output of ``link`` is not what its graph has computed, and hooks on the state it was given."""
    if link.given is not None and has_hooks(link.given):
        raise ChainError(
            f"{link.path} puts a gradient hook, or retain_grad(), on the state that it is given, of whose gradient "
            "the engine sees parts. Put it on a copy, x = x.view_as(x), or on what the block computes."
        )
    if link.out.grad_fn is not link.root:
        raise ChainError(
            f"the output of {link.path} was changed in place through another tensor that shares its memory, returned "
            "beside it or kept by the block: the gradient of that change would be lost. Use the out-of-place operation "
            "(y = y + x, not y += x)."
        )


def refuse_converted(links: Sequence[Link], parameter: Tensor) -> None:
    """Refuse that ``parameter`` got no gradient because it has another dtype or device than in the forward pass."""
    for link in links:
        if was_cast(link.out, parameter):
            raise ChainError(
                f"a parameter of {link.path} got another dtype or device between the forward and the backward pass "
                "(model.float(), model.to(...)), and its gradient would be lost. Convert the model before the forward "
                "pass, or after the backward pass."
            )


def pull_extra(
    links: Sequence[Link],
    parameters: Sequence[Tensor],
    given: Mapping[tuple[int, int], Tensor],
    direct: list[Cotangent],
    total: ChainGradients,
) -> ChainGradients:
    """Pull what the loss sends to tensors that blocks return beside their states, as router losses do.

    All in one autograd call, before the engine solves: what comes back to a block's state is a direct cotangent of the
    state before it, and no engine need know where that is from.

    Args:
        links: the links of the pass.
        parameters: those of the chain.
        given: the cotangents, by the number of a link and that of a tensor in its ``extra``.
        direct: the direct cotangents of the states, which are added to.
        total: what has come to the chain's inputs and parameters by other ways.

    Returns:
        The new total.
    """
    reached = [links[i] for i in sorted({i for i, _ in given})]
    entries = [(i, n, edge) for i in sorted({i for i, _ in given}) for n, edge in links[i].entries]
    numbers = sorted({n for link in reached for n in link.parameters if parameters[n].requires_grad})
    leaves = [parameters[n] for n in numbers]
    if not entries and not leaves:
        return total
    with walking(span(reached[::-1]), list(given.values())), without_hooks(leaves):
        grads = iter(
            torch.autograd.grad(
                [links[i].extra[n] for i, n in given],
                [*(edge for *_, edge in entries), *leaves],  # type: ignore[arg-type]
                [links[i].writable(cotangent) for (i, _), cotangent in given.items()],
                retain_graph=True,
                allow_unused=True,
            )
        )
    for i, number, _ in entries:
        total = add_inside(direct, total, i, number, next(grads))
    for n in numbers:
        total.parameters[n] = plus(total.parameters[n], next(grads))
    return total


def add_inside(
    direct: list[Cotangent], total: ChainGradients, index: int, number: int | None, cotangent: Cotangent
) -> ChainGradients:
    """Return ``total`` with a cotangent of an input of link ``index`` in it, or of the state that entered the chain.

    What the state was that an earlier link has returned is added to ``direct``.
    """
    if number is not None:
        total.inputs[number] = plus(total.inputs[number], cotangent)
    elif index:
        direct[index - 1] = plus(direct[index - 1], cotangent)
    else:
        total = total._replace(initial=plus(total.initial, cotangent))
    return total


def added(a: ChainGradients, b: ChainGradients) -> ChainGradients:
    """Return the sum of both."""
    return ChainGradients(
        plus(a.initial, b.initial),
        [plus(x, y) for x, y in zip(a.inputs, b.inputs, strict=True)],
        [plus(x, y) for x, y in zip(a.parameters, b.parameters, strict=True)],
    )
