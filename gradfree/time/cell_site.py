"""Recorder of a :class:`CellLayer`, which becomes one chain in time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradfree.chains.refusals import problems_of_backward_hooks, problems_of_forward_hooks
from gradfree.chains.report import path_name
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.errors import (
    ATTACHED,
    CHANGED_IN_PLACE,
    CHANGED_STATE,
    NOT_FINITE_INSIDE,
    SETTINGS_CHANGED,
    ChainError,
    refuse,
)
from gradfree.loops.recurrence import LoopMemory
from gradfree.time.cell_chain import CellLayerChain, autocast_now, cell_problems, check_batched_states
from gradfree.time.cell_layer import (
    CellLayer,
    ElementwiseCell,
    or_torchs_layer,
    output_size,
    results,
    runs_by_units,
    state_problems,
)
from gradfree.time.forward import Recurrence, run
from gradfree.time.packing import Padding
from gradfree.time.recorded_step import cell_errors
from gradfree.time.single_steps import SingleStepWarning
from gradfree.torchside.guards import check_finite, refuse_batched, refuse_second_derivatives, refuse_transforms, saved
from gradfree.torchside.hooks import when_backward
from gradfree.torchside.private import is_simulated, transforms_active, uncompiled, version
from gradfree.torchside.sharding import problems_of_shards
from gradfree.torchside.unsaved import Unsaved


class CellLayerSite(Site):
    """A :class:`CellLayer`."""

    dimension = "time"
    several = True
    looks_like = "a gradfree.CellLayer"

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Return whether ``module`` is a :class:`CellLayer`."""
        return isinstance(module, CellLayer)

    @property
    def has_residual(self) -> bool:
        """Whether the cell has a known diagonal Jacobian."""
        return isinstance(self._layer.cell, ElementwiseCell)

    @property
    def has_extra_output(self) -> bool:
        """Whether the cell returns an output that no step reads."""
        return output_size(self._layer.cell) is not None

    @property
    def hidden_gate(self) -> str:
        """What to use in place of a cell of torch with a gate, and of cells that contain one."""
        gated = [type(m).__name__ for m in self._layer.cell.modules() if isinstance(m, nn.GRUCell | nn.LSTMCell)]
        if not gated:
            return ""
        remedy = or_torchs_layer(self._layer.cell).removeprefix(", or ")
        use = f"Use {remedy}" if remedy else "Write it as a gradfree.ElementwiseCell if it acts unit by unit"
        return f"A CellLayer hides the gate of {gated[0]}. {use}."

    def means(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the means of an elementwise cell's diagonal, one for each part of the state."""
        cell = self._layer.cell
        assert isinstance(cell, ElementwiseCell)
        return {f"{self.path}.{n}": (cell.hidden_size,) for n in range(cell.parts)}

    @classmethod
    def attachment_on(cls, module: nn.Module) -> Attachment | None:
        """Return the attachment of the recorder that replaces the layer's loop; ``None`` if there is none."""
        recorder = getattr(vars(module).get("unroll"), "__self__", None)
        return recorder.attachment if isinstance(recorder, CellRecorder) else None

    def problems(self) -> Iterator[str]:
        """Yield what prevents attaching an engine to the layer."""
        yield from problems_of_shards(self.inside)
        if self.attachment_on(self._layer):
            yield ATTACHED.message(path=self.path or "the model")
        if type(self._layer).unroll is not CellLayer.unroll:
            yield (
                f"{path_name(self.path)} is a {type(self._layer).__name__} with another unroll, which an engine would "
                "replace. Override the cell's forward, or leave the layer out: chains=[...]."
            )

    def problems_when_linearised(self) -> Iterator[str]:
        """Yield why the cell cannot run on all steps as one batch."""
        yield from cell_problems(f"{self.path}.cell".removeprefix("."), self._layer.cell)

    def record(self, attachment: Attachment) -> list[Removable]:
        """Replace the layer's loop over steps; the replacement keeps only the states."""
        recorder = CellRecorder(attachment, self._layer, self.inside)
        self._layer.unroll = recorder.unroll  # type: ignore[method-assign]
        return [recorder, Unsaved(self._layer, {"unroll"})]

    @property
    def _layer(self) -> CellLayer:
        return self.blocks[self.path]  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"a layer of {type(self._layer.cell).__name__}, in time"


class CellRecorder:
    """Replaces a :class:`CellLayer`'s loop over steps."""

    def __init__(self, attachment: Attachment, layer: CellLayer, inside: dict[str, nn.Module]):
        self.attachment, self.layer, self.inside = attachment, layer, inside
        self.where = f"{attachment.path}.cell".removeprefix(".")
        self.single_steps = SingleStepWarning(attachment.path)
        self.loop_memory = LoopMemory(attachment.memory.of("segments"), layer.compiler)

    def remove(self) -> None:
        """Restore the layer's own loop."""
        del self.layer.unroll

    @uncompiled
    def unroll(self, x: Any, parts: Sequence[Tensor], padding: Padding | None = None) -> Sequence[Tensor]:
        """Run the cell over the sequence, recorded for the engine; arguments and result as in the layer's own loop.

        Raises:
            ChainError: the engine cannot solve the cell, its state, or its hooks.
        """
        at, trains, parameters = self.attachment, torch.is_grad_enabled(), list(self.layer.cell.parameters())
        compared = at.compares or at.deltas is not None
        # A comparison solves the recorded chain.
        by_loop = at.engine.loops is not None and not compared and not self._records_units(x, parts, padding)
        if by_loop and (trains or at.engine.evaluates):
            return self._run_loop(x, parts, padding)
        if not trains:
            return type(self.layer).unroll(self.layer, x, parts, padding)
        solver = "a comparison of gradients" if compared else "this engine"
        if isinstance(x, tuple):
            raise ChainError(
                f"{self.where} has an input of several tensors, for which {solver} cannot run all steps as one batch. "
                "Concatenate them, or train with 'shooting', 'backprop', 'newton' or 'auto' without a comparison."
            )
        if without_values := is_simulated(x):
            at.solved.add(at.path)  # There is nothing to solve.
        # What else the cell uses may need a gradient, such as an adapter that is no parameter: autograd finds it.
        if without_values or not any(t.requires_grad for t in (x, *parts, *parameters)):
            return type(self.layer).unroll(self.layer, x, parts, padding)
        if padding is not None and len(parts) > 1:
            raise ChainError(
                f"{self.where} has a state of several tensors, which {solver} does not support with packed sequences "
                "or resets. Use 'shooting', 'backprop', 'newton' or 'auto' without a comparison."
            )
        self.single_steps.count(len(x))
        refuse_transforms(self.where)
        refuse(state_problems(self.where, parts, x))
        refuse(problems_of_shards(self.inside))
        refuse((*problems_of_backward_hooks(self.inside), *problems_of_forward_hooks(self.inside)))
        valid = None if padding is None else padding.valid
        out, *finals = _UnrollFunction.apply(self, valid, len(parts), x, *parts, *parameters)
        return [out, *finals] if padding is None else [out, padding.last_steps(out)]

    def _records_units(self, x: Any, parts: Sequence[Tensor], padding: Padding | None) -> bool:
        """Return whether the cell is elementwise, and its engine records such cells of this size."""
        if not runs_by_units(self.layer.cell) or not isinstance(x, Tensor) or transforms_active():
            return False
        fits = all(part.dim() == 2 and len(part) == x.shape[1] and part.is_floating_point() for part in parts)
        fits = fits and (padding is None or len(parts) == 1)
        return fits and self.attachment.engine.records_units(len(x), parts[0])

    def _run_loop(self, x: Any, parts: Sequence[Tensor], padding: Padding | None) -> Sequence[Tensor]:
        """Run the cell's own loop by the engine, on autograd's graph."""
        at, layer = self.attachment, self.layer
        loop = layer.loop(x, parts, padding, at.path or "the cell layer")
        if torch.is_grad_enabled():
            self.single_steps.count(loop.length)
        refuse(problems_of_shards(self.inside))
        found = loop.run() if at.use_exact else at.engine.loops(loop, self.loop_memory, self._scratch)
        outputs = results(found, padding)
        if at.path not in at.solved:
            when_backward([out for out in outputs if out.requires_grad], [partial(at.solved.add, at.path)])
        return outputs

    @property
    def _scratch(self) -> nn.Module | None:
        return self.layer.cell if self.layer.scratch else None


class _Context(FunctionCtx):
    recorder: CellRecorder
    valid: Tensor | None
    parts: int
    parameters: Sequence[Tensor]
    versions: Sequence[int]
    passes: Sequence[object]
    autocast: torch.autocast
    operations: Hashable
    needs_input_grad: tuple[bool, ...]


class _UnrollFunction(torch.autograd.Function):
    """(x, initial state, parameters) -> (outputs, final state)."""

    @staticmethod
    def forward(
        ctx: _Context, recorder: CellRecorder, valid: Tensor | None, parts: int, x: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        cell = recorder.layer.cell
        ctx.recorder, ctx.valid, ctx.parts, ctx.autocast = recorder, valid, parts, autocast_now(x)
        given = [x, *rest, *cell.buffers()]
        before = _marks(given)
        at = recorder.attachment
        first = [part[None] for part in rest[:parts]]
        recurrence = Recurrence(x, first, rest[parts:], None, cell, memory=at.memory, paths=[at.path])
        with cell_errors(recorder.where):
            out, finals, others, ctx.passes = run(at.engine, recurrence)
        if torch.is_autocast_enabled(x.device.type):
            # Older versions of torch keep casts of weights, here without a graph, for passes that need one:
            # https://github.com/pytorch/pytorch/issues/158232
            torch.clear_autocast_cache()
        # The last step runs once more for its graph: one that differs in the backward pass may give equal states.
        last = [torch.cat([h, s[-2:-1]])[-1:] for h, s in zip(first, (out, *others), strict=True)]
        wanted = ctx.needs_input_grad[4 + parts :]
        ends = [final[0] for final in finals]
        chain = CellLayerChain(cell, x[-1:], last, ends, rest[parts:], wanted, at.memory, recorder.where)
        ctx.operations = chain.operations
        if _marks([x, *rest, *cell.buffers()]) != before:
            raise CHANGED_STATE.error(path=recorder.where)
        # Not saved by autograd: saved-tensor hooks may return other tensors, but the cell runs again with its own
        # parameters. Detached aliases: assigning a parameter's ``data`` between the passes does not change them.
        ctx.parameters = [p.detach() for p in rest[parts:]]
        ctx.versions = [p._version for p in ctx.parameters]
        ctx.save_for_backward(x.detach(), *(first.detach() for first in rest[:parts]), out, *others)
        ctx.set_materialize_grads(False)
        # No views: torch refuses in-place changes of views that a function returns.
        return out.detach(), *(final[0].clone() for final in finals)

    @staticmethod
    def backward(ctx: _Context, cotangent: Tensor | None, *finals: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        at, cell, parts = ctx.recorder.attachment, ctx.recorder.layer.cell, ctx.parts
        where = at.path or "the cell layer"
        refuse_batched((cotangent, *finals), where)
        check_finite((cotangent, *finals), where)
        x, *rest = saved(ctx, where)
        first, states, parameters = rest[:parts], rest[parts:], ctx.parameters
        if [p._version for p in parameters] != list(ctx.versions):
            raise CHANGED_IN_PLACE.error(where=where)
        outputs = (cotangent, *[None] * (parts - 1))
        direct = tuple(_with_final(*part) for part in zip(outputs, finals, states, strict=True))
        wanted = ctx.needs_input_grad[4 + parts :]
        with ctx.autocast:
            before = [torch.cat([f.unsqueeze(0), s[:-1]]) for f, s in zip(first, states, strict=True)]
            ends = [s[-1] for s in states]
            chain = CellLayerChain(cell, x, before, ends, parameters, wanted, at.memory, ctx.recorder.where)
            # Finds cells that draw random numbers, count calls, mix rows, or have changed (their mode, a rate, a mask).
            within = max(at.engine.outputs_within(s.dtype) for s in states)
            check_batched_states(chain.after, states, ctx.recorder.where, within, wait=at.path not in at.solved)
            # What is frozen between the passes has no part in the graph any more.
            if chain.operations != ctx.operations and [p.requires_grad for p in cell.parameters()] == list(wanted):
                raise SETTINGS_CHANGED.error(path=ctx.recorder.where)
            chain.valid = ctx.valid
            chain.forward_pass = ctx.passes[0] if ctx.passes else None
            at.refuse_second_solution(ctx)
            gradients = at.solve(chain, direct)
        given = *gradients.inputs, *gradients.initial, *gradients.parameters
        check_finite(given, where, NOT_FINITE_INSIDE)
        at.solved.add(at.path)
        return None, None, None, *given


def _with_final(e: Tensor | None, final: Tensor | None, like: Tensor) -> Tensor:
    """Return the direct cotangents of all steps of a part, from those of the outputs and of the final state."""
    e = torch.zeros_like(like) if e is None else e.to(like.dtype, copy=True)
    if final is not None:
        e[-1] += final
    return e


def _marks(tensors: Iterable[Tensor]) -> list[tuple[int, int, torch.dtype]]:
    """Return the identities of tensors, which must stay alive, their version counters and dtypes."""
    return [(id(tensor), version(tensor), tensor.dtype) for tensor in tensors]
