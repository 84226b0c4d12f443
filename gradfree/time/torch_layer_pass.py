"""The autograd function of one recurrent layer: forward by torch or the engine, backward by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from gradfree.chains.solving import Attachment
from gradfree.errors import NOT_FINITE_INSIDE
from gradfree.time.closed_forms import State
from gradfree.time.forward import Recurrence, run
from gradfree.time.gru_forward import Gates
from gradfree.time.layer_input import is_batch_major
from gradfree.time.packing import Packing
from gradfree.time.torch_layer_chain import TorchLayerChain
from gradfree.torchside.guards import check_finite, refuse_batched, refuse_second_derivatives, saved


def chain_paths(path: str, number: int, directions: int) -> Sequence[str]:
    """Return the names of the directions' chains of a layer, as torch names their weights: "rnn.l0_reverse"."""
    return [f"{path}.l{number}{end}".removeprefix(".") for end in ("", "_reverse")[:directions]]


@dataclass(frozen=True)
class FusedLayer:
    """One layer of a recurrent module; ``paths`` are the names of its directions' chains."""

    attachment: Attachment
    number: int
    mode: str
    paths: Sequence[str]
    packing: Packing | None = None

    @property
    def name(self) -> str:
        """The layer's name in messages: the module's path and the layer's number."""
        path = self.attachment.path
        return f"{path}, layer {self.number}" if path else f"layer {self.number}"

    def recurrence(
        self, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor], trains: bool = True
    ) -> Recurrence:
        """Return the layer before it runs; arguments as in :class:`~gradfree.time.forward.Recurrence`."""
        return Recurrence(
            x,
            first,
            weights,
            self.mode,
            directions=len(self.paths),
            packing=self.packing,
            trains=trains,
            memory=self.attachment.memory,
            paths=self.paths,
        )

    def direct_cotangents(self, like: Tensor, cotangent: Tensor | None, finals: Sequence[Tensor | None]) -> State:
        """Return e of each part: for h from outputs and final h, for c from the final c."""
        of_h, *of_c = finals
        h = torch.zeros_like(like) if cotangent is None else cotangent if of_h is None else cotangent.clone()
        c = [None if final is None else self._add_to_last_step(torch.zeros_like(like), final) for final in of_c]
        return self._add_to_last_step(h, of_h), *c

    def _add_to_last_step(self, e: Tensor, final: Tensor | None) -> Tensor:
        if final is None:
            return e
        if self.packing is None:
            e[-1] += final
        else:
            e.flatten(0, 1).index_add_(0, self.packing.last, final.to(e.dtype))
        return e

    def to_grid(self, x: Tensor, direction: int, keep_layout: bool = False) -> Tensor:
        """Return ``x`` as (T, B, ·), flipped in time for the reverse direction; contiguous without ``keep_layout``."""
        if self.packing is None:
            return x.flip(0) if direction else x if keep_layout else x.contiguous()
        return self.packing.pad(x.index_select(0, self.packing.mirror) if direction else x)

    def from_grid(self, x: Tensor, direction: int) -> Tensor:
        """Undo :meth:`to_grid`."""
        if self.packing is None:
            return x.flip(0) if direction else x
        packed = self.packing.pack(x)
        return packed.index_select(0, self.packing.mirror) if direction else packed


class _Context(FunctionCtx):
    layer: FusedLayer
    inputs: int
    passes: Sequence[object]
    needs_input_grad: tuple[bool, ...]


class LayerFunction(torch.autograd.Function):
    """(x, states, weights) -> (outputs, final states)."""

    @staticmethod
    def forward(ctx: _Context, layer: FusedLayer, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Run the layer without a graph."""
        parts = 2 if layer.mode == "LSTM" else 1
        ctx.layer, ctx.inputs = layer, 1 + len(rest)
        recurrence = layer.recurrence(x, rest[:parts], rest[parts:])
        out, finals, kept, ctx.passes = run(layer.attachment.engine, recurrence)
        # Detached aliases: assigning a parameter's ``data`` between the passes does not change them.
        ctx.save_for_backward(*(tensor.detach() for tensor in (x, *rest)), out, *kept)
        ctx.set_materialize_grads(False)
        # Contiguous, as torch's layers return it; an engine's forward may return other strides. No views, since torch
        # refuses in-place changes of views that a function returns.
        return out.contiguous().detach(), *(final.clone() if final._is_view() else final for final in finals)

    @staticmethod
    def backward(ctx: _Context, cotangent: Tensor | None, *finals: Tensor | None) -> tuple[Tensor | None, ...]:
        """Solve the chain of each direction by the engine."""
        layer, parts = ctx.layer, len(finals)
        refuse_second_derivatives()
        refuse_batched((cotangent, *finals), layer.name)
        check_finite((cotangent, *finals), layer.name)
        if cotangent is None and all(e is None for e in finals):
            return (None,) * len(ctx.needs_input_grad)
        # Autocast may have run the layer in a lower precision than that of its weights.
        tensors = saved(ctx, layer.name)
        x, *others = (tensor.to(tensors[ctx.inputs - 1].dtype) for tensor in tensors)
        rest, (out, *kept) = others[: ctx.inputs - 1], others[ctx.inputs - 1 :]
        wanted = ctx.needs_input_grad[2 + parts :]
        width, each = out.shape[-1] // len(layer.paths), len(wanted) // len(layer.paths)
        layer.attachment.refuse_second_solution(ctx)
        of_x: list[Tensor] = []
        of_states, of_weights = [], []
        for d, path in enumerate(layer.paths):
            gates = Gates(*kept[3 * d : 3 * d + 3]) if kept else None
            keep_layout = gates is not None and is_batch_major(gates.hidden)
            mine, weights = slice(d * width, (d + 1) * width), slice(d * each, (d + 1) * each)
            outs = layer.to_grid(out[..., mine], d, keep_layout)
            e = None if cotangent is None else layer.to_grid(cotangent[..., mine].to(out.dtype), d, keep_layout)
            direct = layer.direct_cotangents(outs, e, [None if final is None else final[d] for final in finals])
            first = [state[d] for state in rest[:parts]]
            inputs, own = layer.to_grid(x, d, keep_layout), rest[parts:][weights]
            needs = [ctx.needs_input_grad[1], *wanted[weights]]
            valid = layer.packing.valid if layer.packing else None
            # The backward pass may run under autocast, as with Lightning's manual optimization.
            with torch.autocast(x.device.type, enabled=False):
                chain = TorchLayerChain(
                    layer.mode, inputs, outs, first, own, needs, layer.attachment.memory, gates, valid
                )
                chain.forward_pass = ctx.passes[d] if ctx.passes else None
                initial, (grad_x,), parameters = layer.attachment.solve(chain, direct, path)
            if grad_x is not None:
                of_x.append(layer.from_grid(grad_x, d))
            of_states.append(initial)
            of_weights += parameters
        of_input = reduce(torch.add, of_x) if of_x else None
        gradients = of_input, *map(torch.stack, zip(*of_states, strict=True)), *of_weights
        check_finite(gradients, layer.name, NOT_FINITE_INSIDE)
        layer.attachment.solved.add(layer.attachment.path)
        return None, *gradients
