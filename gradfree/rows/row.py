"""Rows: the equal blocks of an ``nn.Sequential`` as one autograd function.

The forward pass calls the user's blocks, all but the first one without a graph. The backward pass runs all blocks as
one batch, on a copy of one block without its numbers; each thread has its copy. Before each pass the row checks
structure, modes and hooks. If the blocks cannot be a row, the recorder's hooks record them one by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from threading import local
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import vmap

from gradfree.algebra.cotangents import Cotangent
from gradfree.depth.ports import Port, port_of
from gradfree.depth.recorder import RecordedChain
from gradfree.depth.residual import residual_factor
from gradfree.devices.costs import batch_pays
from gradfree.errors import SETTINGS_CHANGED, STORED_IN_ROW, ChainError
from gradfree.rows.alike import first_line, why_no_row
from gradfree.rows.row_chain import RowChain, entering
from gradfree.rows.settings import Settings
from gradfree.torchside.graph import has_custom_functions, operations, walk
from gradfree.torchside.guards import refuse_batched, refuse_second_derivatives, saved
from gradfree.torchside.hooks import spare_hooks
from gradfree.torchside.private import (
    Function,
    global_hooks,
    is_compiled_around,
    keeps_graph,
    recomputed,
    saves_elsewhere,
    version,
)
from gradfree.torchside.random_state import RandomState
from gradfree.torchside.structure import call, structure_of, tensors_of
from gradfree.torchside.under_vmap import WrongUnderVmap

_PLANS = 16
"""How many decisions a row stores, one for each combination of input, modes and trained parameters."""
_CHANGES = 16
"""After this many passes, each with other settings, the blocks run one by one: a decision takes longer than a pass."""


class RowPlan(local):
    """How to solve a row.

    ``local`` calls ``__init__`` in each thread that uses the plan, so that each has its own copy of the structure: a
    functional call replaces its tensors while it runs.

    Args:
        structure: a copy of a block without its numbers, which shares the block's settings.
        settings: those of all blocks.
    """

    def __init__(self, structure: nn.Module, settings: Settings):
        self.structure, self.settings = structure_of(structure), settings


class _Context(FunctionCtx):
    chain: RecordedChain
    plan: RowPlan
    parameters: Sequence[Tensor]
    path: str
    operations: Hashable
    needs_input_grad: tuple[bool, ...]


class _Blocks(Function):
    """(chain, plan of the pass, the blocks' tensors in a list, h_0, trained parameters) -> h_L."""

    @staticmethod
    def forward(
        ctx: _Context,
        chain: RecordedChain,
        plan: RowPlan,
        tensors: Sequence[Tensor],
        state: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """Run the blocks; keep the states between them, and what operations the first one consists of."""
        ctx.set_materialize_grads(False)
        (first, block), *others = chain.blocks.items()
        with torch.enable_grad():
            given = entering(state)
            out = _run(first, block, given)
        ctx.operations = operations([out], [given, *tensors[: len(tensors) // len(chain.blocks)]])
        states = [state, out.detach()]
        for path, block in others:
            states.append(_run(path, block, states[-1]).detach())
        ctx.chain, ctx.plan, ctx.parameters, ctx.path = chain, plan, parameters, first
        ctx.save_for_backward(*states, *tensors)
        # The model may change the state that it gets in place.
        return states[-1].clone()

    @staticmethod
    def backward(ctx: _Context, cotangent: Cotangent) -> tuple[Cotangent, ...]:
        """Let the engine solve the chain."""
        refuse_second_derivatives()
        if cotangent is None:
            return (None,) * len(ctx.needs_input_grad)
        refuse_batched([cotangent], ctx.path)
        found = saved(ctx, f"the blocks from {ctx.path} on")
        chain, plan, parameters = ctx.chain, ctx.plan, ctx.parameters
        if not keeps_graph():
            del ctx.chain  # Avoids a reference cycle: the chain leads to the blocks, which may store the output.
        paths, names = list(chain.blocks), list(tensors_of(plan.structure))
        states, tensors = found[: len(paths) + 1], found[len(paths) + 1 :]
        columns = {name: tensors[n :: len(names)] for n, name in enumerate(names)}
        row = RowChain(chain, plan.structure, columns, parameters, states, ctx.needs_input_grad[3])
        if row.operations != ctx.operations or plan.settings.changed_elsewhere():
            raise SETTINGS_CHANGED.error(path=ctx.path)
        solved = chain.attachment.solve(row, [*[None] * (len(paths) - 1), cotangent])
        chain.attachment.solved.update(paths)
        chain.joined.update(paths)
        spare_hooks(p for p, g in zip(parameters, solved.parameters, strict=True) if g is None)
        return None, None, None, solved.initial, *solved.parameters


def _run(path: str, block: nn.Module, given: Tensor) -> Tensor:
    # Not block(given): the recorder's hooks would cost as much as a small block. There are no other hooks.
    before, out = version(given), block.forward(given)
    if version(given) != before:
        raise ChainError(f"{path} changes its state in place. Attach with batched=False.")
    return out


def _operations(block: nn.Module, state: Tensor) -> Hashable:
    with torch.enable_grad():
        given = entering(state)
        return operations([block.forward(given)], [given, *tensors_of(block).values()])


class SequentialRow:
    """Replaces the ``forward`` of a container: runs its blocks as a row if they can be one.

    Args:
        chain: the recorded chain of all blocks of the container.
        container: the ``nn.Sequential``.
    """

    _plans: dict[Hashable, RowPlan | str]
    _modules: list[nn.Module]
    _settings: Settings | None
    _hooks: list[tuple[Mapping[int, Any], int]]

    def __init__(self, chain: RecordedChain, container: nn.Module):
        self._chain, self._container, self._one_by_one = chain, container, container.forward
        self.blocks = list(chain.blocks.items())
        self._plans, self._settings, self._changes = {}, None, 0
        vars(container)["forward"] = self.forward

    @classmethod
    def fits(cls, container: nn.Module, blocks: Sequence[nn.Module]) -> bool:
        """Return whether ``container`` only calls the blocks one after the other, as ``nn.Sequential`` does."""
        kind: Any = type(container)
        return (
            isinstance(container, nn.Sequential)
            and kind.forward is nn.Sequential.forward
            and kind.__iter__ is nn.Sequential.__iter__
            and "forward" not in vars(container)
            and all(type(b).__call__ is nn.Module.__call__ for b in blocks)
            and list(container._modules.values()) == list(blocks)
            and all(type(port := port_of(b)) is Port and port.position == 0 for b in blocks)
        )

    def remove(self) -> None:
        """Restore the container's forward, unless the user has replaced it again."""
        if vars(self._container).get("forward") == self.forward:
            del self._container.forward

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the plans and what is watched: a copy has other modules."""
        return {**self.__dict__, "_plans": {}, "_settings": None, "_modules": [], "_hooks": []}

    def forward(self, input: Tensor) -> Any:
        """Run the blocks as a row, or one by one."""
        if not self._can_skip_hooks(input):
            return self._one_by_one(input)
        self._chain.check(self.blocks[0][1])
        settings = self._watched()
        # In the order of tensors_of().
        found = [named for m in self._modules for own in (m._parameters, m._buffers) for named in own.items()]
        plan = self._plan(input, found, settings)
        if isinstance(plan, str):
            if self._chain.attachment.batched is True:
                self._plans.clear()  # The next pass may be after a mend.
                raise ChainError(
                    f"batched=True, but the blocks from {self.blocks[0][0]} on cannot run backward in a batch: "
                    f"{plan}. Use batched='auto', which batches blocks where this is possible and faster."
                )
            return self._one_by_one(input)
        tensors = [t for _, t in found if t is not None]
        parameters = list({id(t): t for t in tensors if t.requires_grad}.values())
        out = _Blocks.apply(self._chain, plan, tensors, input, *parameters)
        if settings.changed():
            raise STORED_IN_ROW.error(path=self.blocks[0][0])
        return out

    def _can_skip_hooks(self, state: Tensor) -> bool:
        """Return whether a pass with this input may run without the recorder's hooks."""
        return (
            not is_compiled_around()
            and torch.is_grad_enabled()
            and not recomputed()
            and not saves_elsewhere()
            and not torch.is_anomaly_enabled()
            and type(state) is Tensor
            and state.is_floating_point()
            and not torch.is_autocast_enabled(state.device.type)  # Under vmap, autocast does not cast.
            and (state.requires_grad or any(t.requires_grad for t in self._container.parameters()))
        )

    def _plan(self, state: Tensor, named: Sequence[tuple[str, Tensor | None]], settings: Settings) -> RowPlan | str:
        """Return the plan of this pass, or a string: why the blocks run one by one."""
        hooked = global_hooks() or any(len(hooks) != count for hooks, count in self._hooks)
        replaced = any("forward" in vars(module) for module in self._modules)
        if hooked or replaced or list(self._container._modules.values()) != [block for _, block in self.blocks]:
            return "they have hooks or another forward"
        if self._changes > _CHANGES:
            return "their attributes change from pass to pass"
        first: dict[int, int] = {}  # Which tensors are tied to which.
        key: Hashable = (
            (state.shape, state.dtype, state.device),
            tuple([m.training for m in self._modules]),
            # A layer that gives up an old parametrization registers its parameter again, as its last one.
            tuple([(name, t if t is None else (t.requires_grad, t.dtype, t.shape)) for name, t in named]),
            tuple([first.setdefault(id(t), n) for n, (_, t) in enumerate(named)]),
        )
        if key not in self._plans:
            # The blocks may draw random numbers as they are looked at.
            random = RandomState(state.device)
            with random.restored():
                plan = self._make_plan(state, settings)
                if random.has_drawn():  # What else is wrong may come from that.
                    plan = "they draw random numbers"
            self._plans = dict(list(self._plans.items())[-_PLANS:]) | {key: plan}
        return self._plans[key]

    def _make_plan(self, state: Tensor, settings: Settings) -> RowPlan | str:
        """Return a new plan, from one run of the block's copy on a batch without samples, or why there is none."""
        blocks, declared = [block for _, block in self.blocks], self._chain.attachment.batched is True
        if reason := why_no_row(blocks, declared):
            return reason
        structure = structure_of(blocks[0], own_settings=True)
        tensors = {name: t.detach().requires_grad_(t.requires_grad) for name, t in tensors_of(blocks[0]).items()}
        # The graph is the same for every batch size, so a batch without samples shows it.
        given = entering(torch.empty_like(state[:0] if state.dim() > 1 else state))
        try:
            with WrongUnderVmap() as wrong:
                out = call(structure, tensors, given)
        except Exception as error:  # The user's forward may raise anything for a batch without samples.
            return f"it does not run without samples ({first_line(error)})"
        if type(out) is not Tensor or out.shape != given.shape or out.dtype is not state.dtype:
            return "they change the shape or dtype of their state"
        graph = walk([out], [cast(Any, given.grad_fn)])
        if not graph.stops:
            return "their output does not depend on their state"
        if not declared and has_custom_functions(graph.kinds):
            return "they use a custom autograd function"
        if wrong.called:
            return f"they call {wrong.called}, which torch.func.vmap computes wrongly"
        if not {id(leaf) for leaf in graph.leaves} <= set(map(id, tensors.values())):
            return "they use a tensor that needs a gradient and is not one of their parameters"
        factor = residual_factor(out, torch.autograd.graph.get_gradient_edge(given))
        engine = self._chain.attachment.engine
        if isinstance(factor, Tensor) and engine.needs_residual and self._chain.declared is None:
            return "their residual path is not the same number in every pass"
        if len({_operations(block, given) for block in blocks}) > 1:
            return "they compute their outputs by different operations"
        try:
            one = {name: t.detach()[None].requires_grad_(t.requires_grad) for name, t in tensors.items()}
            batch = vmap(partial(call, structure), randomness="different")(one, given.detach()[None])
        except Exception as error:  # torch lists nowhere what cannot run in a batch.
            return f"it does not run in a batch ({first_line(error)})"
        if len(walk([batch]).leaves) < len(graph.leaves):
            return "in a batch some of their parameters get no gradient: they ask whether a tensor needs one"
        nodes, parameters = len(graph.nodes), sum(p.numel() for p in structure.parameters())
        if not declared and not batch_pays(state.device, nodes, parameters, nodes * state.numel()):
            return "a batch of such blocks would take longer"
        # A copy that stays: other threads copy it in the backward pass.
        return RowPlan(structure_of(blocks[0]), settings)

    def _watched(self) -> Settings:
        """Return the blocks' settings; after a change of them all plans of rows are dropped."""
        if self._settings is not None:
            if self._changes > _CHANGES:
                return self._settings
            if not self._settings.changed():
                self._changes = 0
                return self._settings
            self._changes += 1
            # A decision runs blocks, so what stands against a row is not looked for again.
            self._plans = {kind: plan for kind, plan in self._plans.items() if isinstance(plan, str)}
        self._modules = [m for _, block in self.blocks for m in block.modules()]
        blocks = {block for _, block in self.blocks}
        # The recorder puts one hook of each kind on a block.
        self._hooks = [
            (hooks, 1 if m in blocks else 0)
            for m in self._modules
            for hooks in (m._forward_hooks, m._forward_pre_hooks)
        ]
        self._settings = Settings(self._modules)
        return self._settings
