"""One block's part of a recorded forward pass, and backward walks through its graph."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import CheckpointFunction

from gradfree.algebra.cotangents import Cotangent, Factor, plus
from gradfree.chains.chain import ChainGradients
from gradfree.chains.refusals import problem_of_hidden_parameters
from gradfree.depth.nodes import BORDERS
from gradfree.depth.residual import residual_factor
from gradfree.errors import ChainError
from gradfree.torchside.graph import Reached, has_custom_functions, is_foreign, walk
from gradfree.torchside.hooks import has_hooks, without_hooks
from gradfree.torchside.private import node_class, version


class BlockGraph(NamedTuple):
    """What a block's graph leads to.

    Attributes:
        state: the edge where h_{i-1} enters the graph of the block's output; ``None`` if it does not, or needs no
            gradient.
        inputs: the edges where other tensors that need a gradient enter it, with their indices in the chain.
        entries: the edges where inputs enter the graph of the output or of extra outputs, with their indices, ``None``
            for the state.
        parameters: the indices in the chain of the trainable parameters that the graph leads to.
        writes: whether a backward walk through the graph may change its first cotangent in place.
        functions: the nodes of custom functions other than torch's.
        group_norm: whether the graph has a ``GroupNorm``.
        problem: why no chain can contain the block; ``None`` if there is no such reason.
    """

    state: GradientEdge | None
    inputs: Sequence[tuple[int, GradientEdge]]
    entries: Sequence[tuple[int | None, GradientEdge]]
    parameters: Sequence[int]
    writes: bool
    functions: Sequence[Node]
    group_norm: bool
    problem: str | None


@dataclass(eq=False)
class Link:
    """One block's part of a forward pass: a graph that ends at the block's Entry node.

    Attributes:
        path: the block's module path.
        block: the block.
        out: the block's output h_i, the root of the graph.
        entry: the node by which inputs enter the graph; ``None`` if none needs a gradient.
        numbers: the index in the chain of each output of ``entry``; ``None`` for the state.
        known: the index in the chain of each trainable parameter, by its id.
        root: the node that computed ``out``; ``None`` if the graph is not kept.
        given: the detached state that the block got; ``None`` if it needs no gradient, or is freed.
        version: the version counter of ``out`` when the block returned it.
        after: the state that the model got. A weak reference: the state leads to its Exit node and so to the pass.
        hooks: the gradient hooks on ``after``, if there are any; kept alive by the graph.
        extra: other outputs of the block that need a gradient; roots of the same graph.
        in_place: whether the block has changed its input state in place.
        only_state: whether the block was called with nothing but its state.
        end: the edge that stands for ``out`` if its values are freed; ``out`` is on the meta device then.
    """

    path: str
    block: nn.Module
    out: Tensor
    entry: Node | None
    numbers: Sequence[int | None]
    known: Mapping[int, int]
    root: Node | None
    given: Tensor | None = None
    version: int = 0
    extra: Sequence[Tensor] = ()
    in_place: bool = False
    after: weakref.ref[Tensor] | None = None
    hooks: weakref.ref[OrderedDict[int, Any]] | None = None
    only_state: bool = True
    end: GradientEdge | None = None

    @cached_property
    def graph(self) -> BlockGraph:
        """What the block's graph leads to; it is walked when this is first needed, in the backward pass."""
        reached = self._reached([self.out, *self.extra])
        foreign = set(filter(is_foreign, reached.kinds))
        entries = [(self.numbers[n], GradientEdge(node, n)) for node, n in sorted(reached.stops, key=itemgetter(1))]
        of_out = entries
        if self.extra:
            stops = self._reached([self.out]).stops
            of_out = [entry for entry in entries if entry[1][:2] in stops]
        return BlockGraph(
            state=of_out[0][1] if of_out and of_out[0][0] is None else None,
            inputs=[(number, edge) for number, edge in of_out if number is not None],
            entries=entries,
            parameters=[self.known[id(leaf)] for leaf in reached.leaves if id(leaf) in self.known],
            writes=has_custom_functions(reached.kinds),
            functions=[node for node in reached.nodes if type(node) in foreign] if foreign else [],
            group_norm=_GROUP_NORM in reached.kinds,
            problem=self._problem_with(reached),
        )

    def leads_to(self, nodes: Set[Node]) -> bool:
        """Return whether the block's graph has one of ``nodes``."""
        return not nodes.isdisjoint(self._reached([self.out, *self.extra]).nodes)

    def _reached(self, outputs: Sequence[Tensor]) -> Reached:
        """Walk from ``outputs`` of the block back to its inputs."""
        return walk(outputs, () if self.entry is None else (self.entry,))

    def _problem_with(self, reached: Reached) -> str | None:
        """Return the message of an error if the block's graph leads to leaves or nodes outside of the pass."""
        foreign = next((leaf for leaf in reached.leaves if id(leaf) not in self.known), None)
        if not reached.kinds.isdisjoint(BORDERS):
            what = "another state of a chain, or a tensor computed from one (such as shared keys and values),"
        elif foreign is not None:
            what = f"a tensor of shape {tuple(foreign.shape)} that needs a gradient and"
        elif _REENTRANT in reached.kinds:
            return (
                f"{self.path} has a checkpoint with use_reentrant=True in it. Torch runs it backward as a part of the "
                "whole model only, not in a single block. Use use_reentrant=False, or leave the block out of the "
                "chain: chains=[...]."
            )
        else:
            # Not a list: most blocks have no custom function, and no need of it.
            trained = ((n, p) for n, p in self.block.named_parameters() if p.requires_grad and id(p) in self.known)
            return problem_of_hidden_parameters(self.path, reached, trained)
        return (
            f"{self.path} uses {what} that is neither an argument of its call nor a parameter that the model had when "
            "the engine was attached. Pass it as an argument by itself or in a plain tuple, or register it and then "
            "attach. If the block makes it, drop its requires_grad=True. Or leave the block out of the chain: "
            "chains=[...]."
        )

    @property
    def state(self) -> GradientEdge | None:
        """The edge where h_{i-1} enters the graph; ``None`` if it does not, or needs no gradient."""
        return self.graph.state

    @property
    def parameters(self) -> Sequence[int]:
        """The indices in the chain of the trainable parameters that the graph leads to."""
        return self.graph.parameters

    @property
    def writes(self) -> bool:
        """Whether a backward walk through the graph may change its first cotangent in place."""
        return self.graph.writes

    @property
    def has_changed(self) -> bool:
        """Whether the output has been changed in place since the block returned it."""
        return version(self.out) != self.version

    @property
    def is_shared(self) -> bool:
        """Whether the output shares memory with the state before it, or with another output."""
        memory = self.out.untyped_storage().data_ptr()
        others = self.extra if self.given is None else [self.given, *self.extra]
        return any(other.untyped_storage().data_ptr() == memory for other in others)

    @property
    def is_hooked(self) -> bool:
        """Whether the model's state has a gradient hook or ``retain_grad()``."""
        after = None if self.after is None else self.after()
        return (self.hooks is not None and bool(self.hooks())) or (after is not None and has_hooks(after))

    @property
    def source(self) -> Tensor | GradientEdge:
        """Where a backward walk through the graph starts."""
        return self.out if self.end is None else self.end

    @cached_property
    def residual(self) -> Factor:
        """K, read from the graph. Cached: a checkpoint gives out its recomputed tensors only once."""
        found = 0.0 if self.state is None else residual_factor(self.out, self.state)
        # Of complex products autograd's cotangents take the conjugate factors.
        return found.conj() if isinstance(found, Tensor) else found

    def with_fields(self, **fields: Any) -> Link:
        """Return a copy with other ``fields``; ``dataclasses.replace`` takes ten times as long."""
        link = object.__new__(Link)
        vars(link).update(vars(self), **fields)
        vars(link).pop("residual", None)
        return link

    def without_state(self) -> Link:
        """Return a copy whose graph does not lead to the state before it; this link where torch would crash.

        GroupNorm in channels_last layout does on CPUs, where its input gets no gradient.
        """
        crashes = self.graph.group_norm and not self.out.is_contiguous()
        return self if crashes else self.with_fields(graph=self.graph._replace(state=None))

    def writable(self, delta: Tensor) -> Tensor:
        """Return ``delta``, or a copy if the walk may change it in place."""
        return delta.clone() if self.writes else delta


def span(links: Sequence[Link]) -> str:
    """Return what messages call ``links``, which run from the end of the chain."""
    return links[0].path if len(links) == 1 else f"{links[-1].path} to {links[0].path}"


@contextmanager
def local_backward(where: str, delta: Sequence[Cotangent]) -> Iterator[None]:
    """Context of a backward walk inside ``where``.

    Raises:
        ChainError: the walk fails, or a hook changes one of the cotangents ``delta`` in place.
    """
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


_REENTRANT = node_class(CheckpointFunction)
_GROUP_NORM: Any = type(torch.group_norm(torch.ones(1, 1, device="cpu", requires_grad=True), 1).grad_fn)

_FREED = (
    "its graph is freed already, by an earlier backward pass or by a loss on a tensor that a block or a hook has kept "
    "from inside. Call backward(retain_graph=True), return that tensor from the block beside the state, or use the "
    "engine 'backprop'."
)


def refuse_hooks(path: str, given: Tensor | None) -> None:
    """Raise if the block at ``path`` has a hook on ``given``, one of its inputs."""
    if given is not None and has_hooks(given):
        raise ChainError(
            f"{path} puts a gradient hook, or retain_grad(), on one of its inputs, where it would see only a part of "
            "the gradient. Put it on a copy, x = x.view_as(x), or on what the block computes."
        )


def check_link(link: Link) -> None:
    """Raise if a block uses tensors from outside, has a hook on its input state, or its output's graph has changed."""
    refuse_hooks(link.path, link.given)
    if link.out.grad_fn is not link.root:
        raise ChainError(
            f"the output of {link.path} was changed in place through another tensor that shares its memory, returned "
            "beside it or kept by the block: the gradient of that change would be lost. Use the out-of-place operation "
            "(y = y + x, not y += x)."
        )
    if link.graph.problem is not None:
        raise ChainError(link.graph.problem)


def add_extra_vjps(
    links: Sequence[Link],
    parameters: Sequence[Tensor],
    given: Mapping[tuple[int, int], Tensor],
    direct: list[Cotangent],
    total: ChainGradients,
) -> ChainGradients:
    """Compute the VJPs of tensors that blocks return beside their states, such as router losses.

    One autograd call for all blocks, before the engine solves the chain. What reaches a block's input state is added to
    the direct cotangent of that state, so engines need not know of extra outputs.

    Args:
        links: the links of the pass.
        parameters: the trainable parameters of the chain.
        given: the cotangents, by the index of a link and the index of a tensor in its ``extra``.
        direct: the direct cotangents of the states; changed in place.
        total: the gradients so far.

    Returns:
        The new total.
    """
    reached = [links[i] for i in sorted({i for i, _ in given})]
    entries = [(i, n, edge) for i in sorted({i for i, _ in given}) for n, edge in links[i].graph.entries]
    numbers = sorted({n for link in reached for n in link.parameters if parameters[n].requires_grad})
    leaves = [parameters[n] for n in numbers]
    if not entries and not leaves:
        return total
    with local_backward(span(reached[::-1]), list(given.values())), without_hooks(leaves):
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
    """Return ``total`` plus the cotangent of one input of link ``index``.

    Args:
        direct: the direct cotangents; that of the state before the link is added here.
        total: the gradients so far.
        index: of the link.
        number: the index of the input in the chain; ``None`` for the state.
        cotangent: of that input.
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
