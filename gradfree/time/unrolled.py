"""Any recurrent cell as a layer, and as a chain in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradfree.chains.refusals import hooked
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.errors import ChainError, refuse
from gradfree.time.cell_layer import CellLayer, ElementwiseCell
from gradfree.time.chain import TimeChain
from gradfree.time.closed_chain import CellChain
from gradfree.time.forward import Recurrence, run
from gradfree.time.unrolled_chain import UnrolledChain, check_rows
from gradfree.torchside.guards import check_finite, check_made_finite, refuse_second_derivatives, saved
from gradfree.torchside.marks import Marks, held_marks, marks_of, unchanged
from gradfree.torchside.sharding import sharded
from gradfree.torchside.unsaved import Unsaved


class Unrolled(Site):
    """A :class:`CellLayer`."""

    dimension = "time"
    several = True
    looks_like = "a gradfree.CellLayer"

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Tell whether ``module`` is a :class:`CellLayer`."""
        return isinstance(module, CellLayer)

    @property
    def has_residual(self) -> bool:
        """Whether it is known what the cell carries."""
        return _closed_form(self._layer.cell) in ("GRU", "LSTM") or isinstance(self._layer.cell, ElementwiseCell)

    def means(self) -> dict[str, tuple[int, ...]]:
        """Return a vector's shape: of the gate of h or, for LSTM, of c; of other cells that of every part."""
        cell = self._layer.cell
        part = int(_closed_form(cell) == "LSTM")
        parts = range(cell.parts) if isinstance(cell, ElementwiseCell) else (part,)
        return {f"0.{n}": (cell.hidden_size,) for n in parts}  # type: ignore[misc]

    @classmethod
    def attachment_on(cls, module: nn.Module) -> Attachment | None:
        """Return the engine of the recorder that stands in for the layer's loop over steps."""
        recorder = getattr(vars(module).get("unroll"), "__self__", None)
        return recorder.attachment if isinstance(recorder, CellRecorder) else None

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the cell."""
        yield from sharded(self.inside)
        if self.holds_engine(self._layer):
            yield f"{self.path} has an engine attached already: call detach() on its handle first."
        if type(self._layer).unroll is not CellLayer.unroll:
            yield f"{self.path} is a {type(self._layer).__name__} with an unroll of its own, which an engine replaces."
        for name, module in self._layer.cell.named_modules():
            where = f"{self.path}.cell.{name}" if name else f"{self.path}.cell"
            if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
                yield (
                    f"{where} has hooks: an engine runs the cell without a graph, "
                    "so what they see has no gradient. Remove them while an engine is attached."
                )
            if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
                yield (
                    f"{where} is a {type(module).__name__}: an engine runs the cell again in the backward pass, which "
                    "would draw other masks or count statistics twice. Put it outside the cell."
                )

    def record(self, attachment: Attachment) -> list[Removable]:
        """Replace the layer's loop over steps, which keeps nothing but the states."""
        recorder = CellRecorder(attachment, self._layer, self.inside)
        self._layer.unroll = recorder.unroll  # type: ignore[method-assign, assignment]
        return [recorder, Unsaved(self._layer, {"unroll"})]

    @property
    def _layer(self) -> CellLayer:
        return self.blocks[self.path]  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"a layer of {type(self._layer.cell).__name__}, in time"


class CellRecorder:
    """Stands in for a :class:`CellLayer`'s loop over steps."""

    def __init__(self, attachment: Attachment, layer: CellLayer, inside: dict[str, nn.Module]):
        self.attachment, self.layer, self.inside = attachment, layer, inside
        self.where = f"{attachment.path}.cell".removeprefix(".")
        self.compared: Marks = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what the cell held when it was last compared: that of a copy is another."""
        return {**self.__dict__, "compared": []}

    def remove(self) -> None:
        """Give the layer its own loop back."""
        del self.layer.unroll

    def unroll(self, x: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what the layer's own loop returns."""
        if not torch.is_grad_enabled():
            return type(self.layer).unroll(self.layer, x, parts)
        refuse(sharded(self.inside))
        refuse(hooked(self.inside))
        if not all(part.is_floating_point() for part in parts):
            raise ChainError(
                f"{self.where} was given a state of {', '.join(str(part.dtype) for part in parts)}: an engine needs "
                "states of real numbers. Keep counters and the like outside of the cell."
            )
        return _UnrollFunction.apply(self, len(parts), x, *parts, *self.layer.cell.parameters())

    def unrolled(
        self,
        x: Tensor,
        states: Sequence[Tensor],
        first: Sequence[Tensor],
        parameters: Sequence[Tensor],
        wanted: Sequence[bool],
        held: Marks,
    ) -> UnrolledChain:
        """Return the chain of a pass of a cell that is not known.

        Args:
            x: (T, B, I).
            states: behind each step, part by part, (T, B, ·).
            first: the initial state, (B, ·).
            parameters: the cell's, in the pass.
            wanted: which of them needed a gradient then.
            held: what :func:`held_marks` was then.

        Raises:
            ChainError: the cell gives other states than in the pass.
        """
        before = [torch.cat([f.unsqueeze(0), s[:-1]]) for f, s in zip(first, states, strict=True)]
        chain = UnrolledChain(self.layer.cell, x, before, parameters, wanted, self.attachment.memory, self.where)
        chain.keep_graph = self.attachment.compares
        # To compare is a sync. Once is enough to find a cell that draws random numbers, counts or mixes rows, which one
        # step alone does not tell; until something of the cell changes: its mode, a rate, a mask that it keeps.
        now = held_marks(self.layer.cell)
        if not (unchanged(held, now) and unchanged(held, self.compared)):
            within = max(self.attachment.engine.outputs_within(s.dtype) for s in states)
            check_rows(chain.after, states, self.where, within)
            self.compared = now if len(x) > 1 else []
        return chain


class _Context(FunctionCtx):
    recorder: CellRecorder
    parts: int
    mode: str | None
    held: Marks
    told: Sequence[Any]
    autocast: torch.autocast
    needs_input_grad: tuple[bool, ...]


class _UnrollFunction(torch.autograd.Function):
    """(x, initial state, parameters) -> (outputs, final state)."""

    @staticmethod
    def forward(ctx: _Context, recorder: CellRecorder, parts: int, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        cell = recorder.layer.cell
        ctx.recorder, ctx.parts, ctx.mode = recorder, parts, _closed_form(cell)
        kind = x.device.type
        ctx.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        before = marks_of([x, *rest, *cell.buffers()])
        at = recorder.attachment
        recurrence = Recurrence(x, rest[:parts], rest[parts:], ctx.mode, cell, memory=at.memory, paths=[at.path])
        out, finals, others, ctx.told = run(at.engine, recurrence)
        if not unchanged(before, marks_of([x, *rest, *cell.buffers()])):
            raise ChainError(
                f"{recorder.where} changes its input, its state, a parameter or a buffer: an engine runs it again in "
                "the backward pass, which would change them once more. Compute new tensors instead, and keep "
                "statistics outside of the cell."
            )
        ctx.held = held_marks(cell)
        ctx.save_for_backward(x, *rest, out, *others)
        ctx.set_materialize_grads(False)
        return out, *finals

    @staticmethod
    def backward(ctx: _Context, cotangent: Tensor | None, *finals: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        recorder, parts = ctx.recorder, ctx.parts
        path, memory = recorder.attachment.path, recorder.attachment.memory
        check_finite((cotangent, *finals), path)
        x, *rest = saved(ctx, path or "the cell layer")
        autocast = ctx.autocast
        if ctx.mode is not None:
            # As in torch's recurrent modules: in the weights' precision, whatever autocast ran the cell in.
            dtype = rest[parts].dtype
            x, *rest = (tensor.to(dtype) for tensor in (x, *rest))
            autocast = torch.autocast(x.device.type, enabled=False)
        first, parameters, states = rest[:parts], rest[parts:-parts], rest[-parts:]
        direct = tuple(
            _with_final(e, final, state)
            for e, final, state in zip((cotangent, *[None] * (parts - 1)), finals, states, strict=True)
        )
        wanted = ctx.needs_input_grad[3 + parts :]
        chain: TimeChain
        with autocast:
            if ctx.mode is not None:
                chain = CellChain(ctx.mode, x, states[0], first, parameters, [True, *wanted], memory, "0")
            else:
                chain = recorder.unrolled(x, states, first, parameters, wanted, ctx.held)
            chain.told = ctx.told[0] if ctx.told else None
            gradients = recorder.attachment.solve(chain, direct)
        given = *gradients.inputs, *gradients.initial, *gradients.parameters
        check_made_finite(given, path or "the cell layer")
        recorder.attachment.solved.add(path)
        return None, None, *given


def _with_final(e: Tensor | None, final: Tensor | None, like: Tensor) -> Tensor:
    e = torch.zeros_like(like) if e is None else e.to(like.dtype, copy=True)
    if final is not None:
        e[-1] += final
    return e


def _closed_form(cell: nn.Module) -> str | None:
    """Return the name of the cell if it is one of torch's own and nothing has changed what it computes."""
    as_made = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    if "forward" in vars(cell) or cell._forward_pre_hooks or cell._forward_hooks or list(cell._parameters) != as_made:
        return None
    names: dict[type, str] = {nn.GRUCell: "GRU", nn.LSTMCell: "LSTM"}
    if type(cell) is nn.RNNCell:
        return f"RNN_{cell.nonlinearity.upper()}"
    return names.get(type(cell))
