"""Recording a forward pass through a chain of modules so that ``loss.backward()`` asks the engine for gradients.

The model runs its blocks itself; hooks on them cut autograd's graph at the block borders: see :mod:`.borders`.

No pass is kept on the modules: a state tensor's own graph node tells which pass it belongs to, so passes may
overlap and a model may be called several times before one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, increment_version

from gradfree.algebra.cotangents import Cotangent
from gradfree.chains.refusals import hooked
from gradfree.chains.site import Site
from gradfree.chains.solving import Attachment
from gradfree.depth.batched_chain import Ran
from gradfree.depth.batching import Batching, Setting
from gradfree.depth.borders import Entries, Exits, Outputs
from gradfree.depth.chain import DepthChain
from gradfree.depth.jacobians import Mixing
from gradfree.depth.link import Link
from gradfree.errors import ChainError, refuse
from gradfree.torchside.guards import check_finite
from gradfree.torchside.sharding import sharded


class _Handed(NamedTuple):
    """A state that was handed on.

    Attributes:
        state: as the model has it.
        seen: the same values, with the model's count of changes in place.
        version: that count, at first.
    """

    state: weakref.ref[Tensor]
    seen: Tensor
    version: int


class Recording:
    """What one forward pass through a chain leaves behind for its backward pass."""

    ahead = True
    """Whether a node may serve several blocks, which keeps states in memory until the backward pass."""

    def __init__(self, chain: RecordedChain, parameters: Sequence[Tensor], inputs: Sequence[Tensor]):
        self.chain = chain
        self.parameters = parameters
        self.numbers = {id(p): n for n, p in enumerate(parameters)}
        self.inputs = [(tensor, get_gradient_edge(tensor)) for tensor in inputs]
        self.start: weakref.ref[Any]
        self.setting: Setting | None = None
        self.links: list[Link | Ran] = []
        self.given: list[Tensor] = []
        self.handed: list[_Handed] = []
        self.paths: set[str] = set()
        self.direct: list[Cotangent] = []
        self.backward = -1
        self.freed = False
        self._exits, self._entries = Outputs(), Outputs()
        self._entered: list[str] = []

    def before(self, path: str, block: nn.Module, state: Tensor) -> None:
        """Note that ``block`` is about to run on ``state``."""

    def add(self, link: Link | Ran) -> None:
        """Keep what ``link`` has left."""
        self.links.append(link)

    def more(self) -> int:
        """Return for how many blocks to come a node is to serve: as many again, so that few nodes serve many blocks."""
        return min(len(self.links), len(self.chain.blocks) - len(self.links) - 1) if self.ahead else 0

    def enter(self, path: str, state: Tensor) -> Tensor:
        """Return ``state`` without history, for the block at ``path``."""
        local = self._entries.fill(state)
        if local is None:
            self._entered = []
            local, *rest = Entries.apply(self._entered, self.more(), state.detach().requires_grad_())
            self._entries = Outputs(rest)
        self._entered.append(path)
        return local

    def leave(self, link: Link | Ran, given: Tensor, before: Tensor) -> Tensor:
        """Keep ``link``, whose block was ``given`` a state; return its own for the model to go on with."""
        more = self.more()
        self.add(link)
        self.given.append(given)
        self.paths.add(link.path)
        out = link.out.detach()
        state = self._exits.fill(out)
        if state is None:
            guard, state, *rest = Exits.apply(self, len(self.links) - 1, before, out, more)
            # Of all hooks, those on tensors run even where the node itself will not.
            guard.register_hook(self._check_start)
            self._exits = Outputs(rest)
        self.handed.append(_Handed(weakref.ref(state), state.detach() if self.ahead else out, state._version))
        return state

    def _check_start(self, _: Cotangent) -> None:
        """Refuse a backward pass that will not reach the chain's start."""
        start = self.start()
        assert start is not None  # The graph that is walked leads to it.
        if not torch._C._will_engine_execute_node(start):
            raise ChainError(
                f"torch.autograd.grad was asked for the gradient of a state between {self.links[0].path} and "
                f"{self.links[-1].path}: inside a chain there is its direct cotangent only. Detach the engine, or ask "
                "for gradients of parameters or of what lies before the chain."
            )

    def begin_backward(self) -> None:
        """Forget what another backward pass has left; refuse one through graphs that are freed."""
        if self.freed:
            raise ChainError(
                "Trying to backward through a chain a second time: its graphs are freed. Call the first backward with "
                "retain_graph=True."
            )
        backward = torch._C._current_graph_task_id()
        if backward != self.backward:
            self.backward, self.direct = backward, [None] * len(self.links)

    def collect(self, index: int, cotangents: Sequence[Cotangent]) -> None:
        """Keep the direct cotangents of the states from that of link ``index`` on."""
        self.begin_backward()
        for i, cotangent in enumerate(cotangents, index):
            if cotangent is not None:
                check_finite([cotangent], self.links[i].path)
                # Autograd may hand the same tensor on to a function that changes it in place, long before it is used.
                self.direct[i] = cotangent.clone()

    def solve(self) -> tuple[Cotangent, ...]:
        """Return the gradients of the initial state, the other inputs and the parameters."""
        self.begin_backward()
        self._exits, self._entries = Outputs(), Outputs()
        for link, handed in zip(self.links[:-1], self.handed, strict=False):
            refuse_hooks(handed.state(), link.path)
        for link in self.links:
            _refuse_changed(link)
        self._follow_changes()
        direct, self.direct = self.direct, []
        last = max((i for i, e in enumerate(direct) if e is not None), default=None)
        if last is None:
            return (None,) * (1 + len(self.inputs) + len(self.parameters))
        links, keep = self.links[: last + 1], _keep_graph()
        gradients = self.chain.attachment.solve(self.linearise(links, keep), direct[: last + 1])
        self.chain.attachment.solved.update(link.path for link in links)
        if not keep:
            self.links, self.given, self.handed, self.freed = [], [], [], True
        return gradients.initial, *gradients.inputs, *gradients.parameters

    def _follow_changes(self) -> None:
        """Let the blocks' graphs know of states that the model has changed in place: autograd refuses what it needs."""
        for i, (_, seen, version) in enumerate(self.handed):
            if seen._version != version:
                increment_version([self.links[i].out, *self.given[i + 1 : i + 2]])
                if isinstance(after := (self.links[i + 1] if i + 1 < len(self.links) else None), Ran):
                    raise ChainError(
                        f"the state that {after.path} was given has been modified by an inplace operation since, but "
                        "the backward pass needs it. Use the out-of-place operation (h = h + x, not h += x)."
                    )

    def linearise(self, links: Sequence[Any], keep_graph: bool) -> DepthChain:
        """Return what the engine sees of the pass: ``links``, those that the loss has reached."""
        memory, mixing = self.chain.attachment.memory, self.chain.mixing
        chain = DepthChain(links, self.parameters, len(self.inputs), keep_graph, memory, mixing)
        if self.setting is None or self.chain.batching is None:
            return chain
        return self.chain.batching.chain(self, chain, self.given[0].requires_grad)


class RecordedChain:
    """One chain of a model with an engine attached.

    Args:
        attachment: solves for the gradients.
        site: the chain.
    """

    def __init__(self, attachment: Attachment, site: Site):
        self.attachment = attachment
        self.blocks, self.inside = site.blocks, site.inside
        self.mixing = Mixing()
        engine, batched = attachment.engine, attachment.batched
        self.batching: Batching | None = None
        if batched and engine.pulls_at_once and site.can_be_batched:
            self.batching = Batching(self.blocks, batched, engine.needs_residual)
        modules = dict.fromkeys(m for block in self.blocks.values() for m in block.modules())
        # What every pass looks at, in one place: to go through all modules for it costs more than small blocks do.
        self._parameters = [module._parameters for module in modules if module._parameters]
        self._hooks = [h for m in self.inside.values() for h in (m._backward_hooks, m._backward_pre_hooks)]

    def begin(self, state: Tensor, parameters: Sequence[Tensor], inputs: Sequence[Tensor]) -> Recording:
        """Return the recording of a pass that starts from ``state``."""
        return Recording(self, parameters, inputs)

    def trainable(self) -> list[Tensor]:
        """Return the parameters of all blocks that need a gradient, each once."""
        found = (p for own in self._parameters for p in own.values() if p is not None and p.requires_grad)
        # By identity: the hash of a tensor is computed in Python.
        return list({id(p): p for p in found}.values())

    def check(self) -> None:
        """Refuse what may have come since the engine was attached: sharded modules, and backward hooks."""
        refuse(sharded(self.inside))
        if any(self._hooks):
            refuse(hooked(self.inside))


def refuse_hooks(state: Tensor | None, path: str) -> None:
    """Refuse gradient hooks on the state behind the block at ``path``."""
    if state is not None and (state._backward_hooks or state.retains_grad):
        raise ChainError(
            f"the output of {path} has a gradient hook or retain_grad(): it would see the state's direct cotangent "
            "only, not its whole gradient. Remove it while an engine is attached."
        )


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
