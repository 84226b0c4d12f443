"""Recording a forward pass through a chain of modules so that ``loss.backward()`` asks the engine for gradients.

The model runs its blocks itself; hooks on them cut autograd's graph at the block borders, with nodes of their own
(:mod:`~gradfree.depth.borders`). No pass is kept on the modules: a state tensor's own graph node tells which pass it
belongs to, so passes may overlap and a model may be called several times before one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gradfree.algebra.cotangents import Cotangent, plus
from gradfree.chains.chain import ChainGradients
from gradfree.chains.solving import Attachment
from gradfree.depth.beside import add_inside, pull_beside
from gradfree.depth.borders import INSIDE_ALONE, Anchor, Start
from gradfree.depth.chain import DepthChain
from gradfree.depth.jacobians import Mixing
from gradfree.depth.link import Link
from gradfree.errors import ChainError
from gradfree.torchside.guards import check_finite


class Attached(Protocol):
    """What a recording knows of its chain."""

    attachment: Attachment
    mixing: Mixing

    def trainable(self) -> list[Tensor]:
        """Return the parameters of its blocks that need a gradient."""


class Recording:
    """What one forward pass through a chain leaves behind for its backward pass.

    Attributes:
        chain: what is recorded.
        parameters: what may be trained in it: its own parameters, and those around it.
        numbers: the places of parameters in that list, by their ids.
        inputs: the tensors that need a gradient and that the first block was given beside its state.
        links: the blocks that have run.
        uncut: whether the graphs of some links lead to others', or out of the chain.
        solving: whether the engine solves the chain at the moment.
    """

    def __init__(self, chain: Attached, parameters: Sequence[Tensor], inputs: Sequence[Tensor]):
        self.chain = chain
        self.parameters = parameters
        self.numbers = {id(p): n for n, p in enumerate(parameters)}
        self.inputs = [(tensor, get_gradient_edge(tensor)) for tensor in inputs]
        self.anchor = Anchor.apply(*parameters)
        self.links: list[Link] = []
        self.states: list[weakref.ref[Tensor]] = []
        self.uncut = False
        self.solving = False
        self.freed = False
        self._start: weakref.ref[Any] | None = None
        self._backward = -1
        self._direct: list[Cotangent] = []
        self._beside: dict[tuple[int, int], Tensor] = {}
        self._inside: list[tuple[int, int | None, Cotangent]] = []
        self._solved = False

    def start(self, state: Tensor) -> Tensor:
        """Put the Start node behind ``state``; return what the first block's nodes are to follow."""
        return Start.apply(self, state, *self.given())

    def started(self, node: Any) -> None:
        """Remember the Start node."""
        self._start = weakref.ref(node)

    def given(self) -> list[Tensor]:
        """Return what Start was given besides the initial state."""
        return [*(tensor for tensor, _ in self.inputs), *self.parameters]

    def before(self, path: str, block: nn.Module, state: Tensor) -> None:
        """Note that ``block`` is about to run on ``state``."""

    def add(self, link: Link) -> None:
        """Keep what ``link`` has left."""
        self.links.append(link)

    def collect(self, index: int, beside: int | None, cotangent: Cotangent) -> None:
        """Keep the direct cotangent of a link's state, or the one of what it returned beside it."""
        self._begin()
        check_finite([cotangent], self.links[index].path)
        # Autograd may hand the same tensor on to a function that changes it in place, long before it is used here.
        kept = None if cotangent is None else cotangent.clone()
        if beside is None:
            self._direct[index] = kept
        elif kept is not None:
            self._beside[index, beside] = kept

    def collect_inside(self, index: int, number: int | None, cotangent: Cotangent) -> None:
        """Keep what came back to the state that a link was given, or to one of its other inputs.

        Autograd takes what was computed last first, and so comes here before it comes to Start, unless some of what
        led here lies on another device.
        """
        self._begin(inside=True)
        if self._solved:
            raise ChainError(
                f"the loss uses a tensor from inside the chain {self.chain.attachment.path!r} on another device: its "
                "gradient came too late. Keep it on the device of the chain, or return it beside the state."
            )
        if cotangent is not None:
            self._inside.append((index, number, cotangent.clone()))

    def _begin(self, inside: bool = False) -> None:
        """Forget what another backward pass has left; refuse one that will not reach the chain's start."""
        if self.freed:
            raise ChainError(
                "Trying to backward through a chain a second time: its graphs are freed. Call the first backward with "
                "retain_graph=True."
            )
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward, self._direct, self._beside, self._inside = backward, [None] * len(self.links), {}, []
        self._solved = False
        start = None if self._start is None else self._start()
        if start is not None and torch._C._will_engine_execute_node(start):
            return
        if inside or not self.links:
            raise ChainError(INSIDE_ALONE.format(path=self.chain.attachment.path or "the model"))
        raise ChainError(
            f"torch.autograd.grad was asked for the gradient of a state between {self.links[0].path} and "
            f"{self.links[-1].path}: inside a chain there is its direct cotangent only. Detach the engine, or ask "
            "for gradients of parameters or of what lies before the chain."
        )

    def solve(self) -> tuple[Cotangent, ...]:
        """Return the gradients of the initial state, the other inputs and the parameters."""
        self._begin()
        self._refuse()
        self.solving = True
        try:
            gradients = self._gradients(_keep_graph())
        finally:
            self.solving = False
        self._solved = True
        return gradients.initial, *gradients.inputs, *gradients.parameters

    def _gradients(self, keep: bool) -> ChainGradients:
        direct, beside, inside = self._direct, self._beside, self._inside
        self._direct, self._beside, self._inside = [], {}, []
        total = ChainGradients(None, [None] * len(self.inputs), [None] * len(self.parameters))
        if beside:
            total = pull_beside(self.links, self.parameters, beside, direct, total)
        for index, number, cotangent in inside:
            total = add_inside(direct, total, index, number, cotangent)
        last = max((i for i, e in enumerate(direct) if e is not None), default=None)
        if last is not None:
            links = self.links[: last + 1]
            total = _sum(
                self.chain.attachment.solve(self.linearise(links, keep or self.uncut), direct[: last + 1]), total
            )
            self.chain.attachment.solved.update(link.path for link in links)
        if not keep:
            self.links, self.freed = [], True
        return total

    def _refuse(self) -> None:
        for link, state in zip(self.links[:-1], self.states, strict=False):
            refuse_hooks(state(), link.path)
        for link in self.links:
            _refuse_changed(link)
        for index, link in enumerate(self.links[1:]):
            if link.in_place and self._direct[index] is not None:
                raise ChainError(
                    f"{link.path} changes its input in place, the output of {self.links[index].path}, which the model "
                    "uses elsewhere, too: there it has the gradient of one of its two values. Use the out-of-place "
                    "operation (nn.ReLU(inplace=False), x = x + y)."
                )

    def linearise(self, links: Sequence[Link], keep_graph: bool) -> DepthChain:
        """Return what the engine sees of the pass: ``links``, those that the loss has reached."""
        memory, mixing = self.chain.attachment.memory, self.chain.mixing
        return DepthChain(links, self.parameters, len(self.inputs), keep_graph, memory, mixing)


def _sum(a: ChainGradients, b: ChainGradients) -> ChainGradients:
    return ChainGradients(
        plus(a.initial, b.initial),
        [plus(x, y) for x, y in zip(a.inputs, b.inputs, strict=True)],
        [plus(x, y) for x, y in zip(a.parameters, b.parameters, strict=True)],
    )


def refuse_hooks(state: Tensor | None, path: str) -> None:
    """Refuse a state inside a chain that has got a hook."""
    if state is not None and has_hooks(state):
        raise ChainError(
            f"the output of {path} has got a gradient hook or retain_grad() after the next block has used it: it would "
            "see the state's direct cotangent only, not its whole gradient. Register it before, or remove it."
        )


def has_hooks(state: Tensor) -> bool:
    """Tell whether anybody looks at the gradient of ``state``."""
    return bool(state._backward_hooks) or state.retains_grad


def _refuse_changed(link: Link) -> None:
    if link.out.grad_fn is not link.root:
        raise ChainError(
            f"the output of {link.path} was changed in place through another tensor that shares its memory, returned "
            "beside it or kept by the block: the gradient of that change would be lost. Use the out-of-place operation "
            "(y = y + x, not y += x)."
        )


def _keep_graph() -> bool:
    """Tell whether the running backward pass was called with ``retain_graph=True``."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if query is None else query()
