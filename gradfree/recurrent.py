"""Recording torch's recurrent modules: each layer and direction becomes one chain in time.

The module's ``forward`` is replaced on the instance. It runs torch's own fused kernel without a graph, layer by layer,
inside an autograd function whose backward asks the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.utils.rnn import PackedSequence

from gradfree.cells import State
from gradfree.graph import check_finite, check_made_finite, refuse_second_derivatives, saved
from gradfree.gru_forward import Gates, gru_with_gates, pays
from gradfree.scan import plus
from gradfree.site import Removable, Site
from gradfree.solving import solve
from gradfree.time_chain import CellChain

if TYPE_CHECKING:
    from gradfree.engine import Engine

_FUSED: dict[str, Any] = {
    "RNN_TANH": torch._VF.rnn_tanh,
    "RNN_RELU": torch._VF.rnn_relu,
    "GRU": torch._VF.gru,
    "LSTM": torch._VF.lstm,
}


class Packing:
    """Where the rows of packed sequences lie in a padded (T, B) grid."""

    def __init__(self, batch_sizes: Tensor, device: torch.device):
        self.batch_sizes = batch_sizes
        steps, batch = len(batch_sizes), int(batch_sizes[0])
        # On the CPU, as the sizes are, whatever torch.set_default_device says.
        samples, step = (torch.arange(n, device=batch_sizes.device) for n in (batch, steps))
        inside = samples < batch_sizes.unsqueeze(1)
        lengths = inside.sum(0)
        number = inside.cumsum(1) - 1 + (batch_sizes.cumsum(0) - batch_sizes).unsqueeze(1)
        mirrored = (lengths - 1 - step.unsqueeze(1)).clamp(min=0)
        self.shape = (steps, batch)
        self.inside = inside.unsqueeze(-1).to(device, non_blocking=True)
        self.rows = inside.flatten().nonzero().squeeze(1).to(device, non_blocking=True)
        self.last = ((lengths - 1) * batch + samples).to(device, non_blocking=True)
        self.mirror = number.gather(0, mirrored)[inside].to(device, non_blocking=True)

    def pad(self, data: Tensor) -> Tensor:
        """Return packed rows (N, ·) as (T, B, ·), zeros behind each sequence."""
        padded = data.new_zeros(self.shape[0] * self.shape[1], data.shape[1])
        return padded.index_copy_(0, self.rows, data).unflatten(0, self.shape)

    def pack(self, padded: Tensor) -> Tensor:
        """Return (T, B, ·) as packed rows (N, ·)."""
        return padded.flatten(0, 1).index_select(0, self.rows)


@dataclass(frozen=True)
class Layer:
    """One layer of a recurrent module, in one direction or both."""

    path: str
    number: int
    engine: Engine
    mode: str
    directions: int
    packing: Packing | None
    memory: dict[str, Tensor]
    lean: bool

    def run(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor], Gates | None]:
        """Return the outputs, shaped as ``x``, the final states, (directions, B, H), and the gates if kept."""
        if self._keeps_gates and pays(x, weights[1].shape[1]):
            out, gates = gru_with_gates(x, states[0][0], weights)
            return out, [out[-1:].clone()], gates
        hx = states if len(states) > 1 else states[0]
        options = (len(weights) > 2 * self.directions, 1, 0.0, False, self.directions > 1)
        if self.packing is not None:
            out, *finals = _FUSED[self.mode](x, self.packing.batch_sizes, hx, weights, *options)
        elif self.mode == "LSTM" and x.device.type == "cpu" and x.dtype is not torch.float64:
            # Where gradients are off, oneDNN's LSTM is another one, which rounds otherwise. No graph comes of it.
            given = [tensor.detach() for tensor in (x, *hx, *weights)]
            with torch.enable_grad():
                out, *finals = _FUSED[self.mode](given[0], given[1:3], given[3:], *options, False)
        else:
            out, *finals = _FUSED[self.mode](x, hx, weights, *options, False)
        return out, finals, None

    @property
    def name(self) -> str:
        """Which layer of which module, for messages."""
        return f"{self.path}, layer {self.number}" if self.path else f"layer {self.number}"

    def chain_path(self, direction: int) -> str:
        """Name one of its chains as torch names its weights."""
        return f"{self.path}.l{self.number}{'_reverse' if direction else ''}".removeprefix(".")

    @property
    def _keeps_gates(self) -> bool:
        return self.mode == "GRU" and self.directions == 1 and self.packing is None and not self.lean

    def direct(self, like: Tensor, cotangent: Tensor | None, finals: Sequence[Tensor | None]) -> State:
        """Return e_t of every part: of h what the outputs and the final h get, of c what the final c gets."""
        of_h, *of_c = finals
        h = torch.zeros_like(like) if cotangent is None else cotangent.clone()
        c = [None if final is None else self._add_at_the_end(torch.zeros_like(like), final) for final in of_c]
        return self._add_at_the_end(h, of_h), *c

    def _add_at_the_end(self, e: Tensor, final: Tensor | None) -> Tensor:
        if final is None:
            return e
        if self.packing is None:
            e[-1] += final
        else:
            e.flatten(0, 1).index_add_(0, self.packing.last, final)
        return e

    def grid(self, x: Tensor, direction: int) -> Tensor:
        """Return ``x`` as (T, B, ·) in the order in which ``direction`` runs."""
        if self.packing is None:
            return x.flip(0) if direction else x.contiguous()
        return self.packing.pad(x.index_select(0, self.packing.mirror) if direction else x)

    def rows(self, x: Tensor, direction: int) -> Tensor:
        """Undo :meth:`grid`."""
        if self.packing is None:
            return x.flip(0) if direction else x
        packed = self.packing.pack(x)
        return packed.index_select(0, self.packing.mirror) if direction else packed


class _Context(FunctionCtx):
    layer: Layer
    inputs: int
    needs_input_grad: tuple[bool, ...]


class _LayerFunction(torch.autograd.Function):
    """(x, states, weights) -> (outputs, final states)."""

    @staticmethod
    def forward(ctx: _Context, layer: Layer, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        parts = 2 if layer.mode == "LSTM" else 1
        ctx.layer, ctx.inputs = layer, 1 + len(rest)
        out, finals, gates = layer.run(x, rest[:parts], rest[parts:])
        ctx.save_for_backward(x, *rest, out, *(gates or ()))
        ctx.set_materialize_grads(False)
        return out, *finals

    @staticmethod
    def backward(ctx: _Context, cotangent: Tensor | None, *finals: Tensor | None) -> tuple[Tensor | None, ...]:
        layer, parts = ctx.layer, len(finals)
        refuse_second_derivatives()
        check_finite((cotangent, *finals), layer.name)
        if cotangent is None and all(e is None for e in finals):
            return (None,) * len(ctx.needs_input_grad)
        # Autocast may have run the layer in a lower precision than its weights'.
        tensors = saved(ctx, layer.name)
        x, *others = (tensor.to(tensors[ctx.inputs - 1].dtype) for tensor in tensors)
        rest, (out, *kept) = others[: ctx.inputs - 1], others[ctx.inputs - 1 :]
        wanted = ctx.needs_input_grad[2 + parts :]
        width, each = out.shape[-1] // layer.directions, len(wanted) // layer.directions
        of_x: Tensor | None = None
        of_states, of_weights = [], []
        for d in range(layer.directions):
            mine, weights = slice(d * width, (d + 1) * width), slice(d * each, (d + 1) * each)
            outs = layer.grid(out[..., mine], d)
            e = None if cotangent is None else layer.grid(cotangent[..., mine].to(out.dtype), d)
            direct = layer.direct(outs, e, [None if final is None else final[d] for final in finals])
            first, fed, own = [state[d] for state in rest[:parts]], layer.grid(x, d), rest[parts:][weights]
            needs = [ctx.needs_input_grad[1], *wanted[weights]]
            gates, inside = Gates(*kept) if kept else None, layer.packing.inside if layer.packing else None
            name = f"{layer.number}.{d}"
            # Also where the backward pass runs under autocast, as in manual optimization in Lightning.
            with torch.autocast(x.device.type, enabled=False):
                chain = CellChain(layer.mode, fed, outs, first, own, needs, layer.memory, name, gates, inside)
                initial, inputs, parameters = solve(layer.engine, chain, direct, layer.chain_path(d))
            of_x = plus(of_x, None if inputs[0] is None else layer.rows(inputs[0], d))
            of_states.append(initial)
            of_weights += parameters
        gradients = of_x, *map(torch.stack, zip(*of_states, strict=True)), *of_weights
        check_made_finite(gradients, layer.name)
        return None, *gradients


class Recurrent(Site):
    """An ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``: a chain in time for each of its layers and directions."""

    looks_like = "an nn.RNN, nn.GRU or nn.LSTM"

    @staticmethod
    def accepts(module: nn.Module) -> bool:
        """Tell whether ``module`` is one of torch's recurrent modules."""
        return isinstance(module, nn.RNNBase)

    is_evident = accepts

    @property
    def has_residual(self) -> bool:
        """Whether the cell has a gate."""
        return not isinstance(self._module, nn.RNN)

    def means(self) -> dict[str, tuple[int, ...]]:
        """Return a vector's shape for each layer and direction: of the gate of h or, for LSTM, of c."""
        part = int(self._module.mode == "LSTM")
        layers, directions = range(self._module.num_layers), range(1 + self._module.bidirectional)
        return {f"{n}.{d}.{part}": (self._module.hidden_size,) for n in layers for d in directions}

    @staticmethod
    def holds_engine(module: nn.Module) -> bool:
        """Tell whether the module's forward is a recorder's."""
        return isinstance(getattr(vars(module).get("forward"), "__self__", None), RecurrentRecorder)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the module."""
        module = self._module
        if self.holds_engine(module):
            yield f"{self.path} has an engine attached already: call detach() on its handle first."
        elif "forward" in vars(module):
            yield f"{self.path} has a forward of its own on the instance. Remove it while an engine is attached."
        elif type(module).forward not in {nn.RNN.forward, nn.GRU.forward, nn.LSTM.forward}:
            yield f"{self.path} is a {type(module).__name__} with a forward of its own, which an engine would replace."
        if module.proj_size:
            yield f"{self.path} has proj_size={module.proj_size}, which no engine supports. Use proj_size=0."

    def record(self, engine: Engine, memory: dict[str, Tensor], lean: bool) -> list[Removable]:
        """Replace the module's forward."""
        recorder = RecurrentRecorder(engine, self.path, self._module, memory, lean)
        self._module.forward = recorder.forward
        return [recorder]

    @property
    def _module(self) -> nn.RNNBase:
        return self.blocks[self.path]  # type: ignore[return-value]

    def __str__(self) -> str:
        layers = "1 layer" if self._module.num_layers == 1 else f"{self._module.num_layers} layers"
        return f"{self._module.mode}, {layers}{' in both directions' if self._module.bidirectional else ''}, in time"


class RecurrentRecorder:
    """Stands in for the ``forward`` of an ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``."""

    def __init__(self, engine: Engine, path: str, module: nn.RNNBase, memory: dict[str, Tensor], lean: bool):
        self.engine, self.path, self.module, self.memory, self.lean = engine, path, module, memory, lean

    def remove(self) -> None:
        """Give the module its own forward back."""
        del self.module.forward

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Return what the module returns, bitwise; arguments as the module's."""
        module = self.module
        if not torch.is_grad_enabled():
            return type(module).forward(module, input, hx)
        packed = isinstance(input, PackedSequence)
        x: Any
        x, batch_sizes, order, back = input if packed else (input, None, None, None)
        if not packed and not _well_formed(x, hx):
            return type(module).forward(module, input, hx)  # It raises, in its own words.
        batched, batch_first = packed or x.dim() == 3, module.batch_first and not packed
        # As the module itself does: the layout decides how products are rounded.
        x = x if batched else x.unsqueeze(0 if batch_first else 1)
        x = x.transpose(0, 1) if batch_first else x
        states = self._initial(x, batch_sizes, order, hx, batched)
        packing = None if batch_sizes is None else Packing(batch_sizes, x.device)
        out, finals = self._layers(x, states, packing)
        finals = [final if back is None else final.index_select(1, back) for final in finals]
        if packed:
            return PackedSequence(out, batch_sizes, order, back), tuple(finals) if len(finals) > 1 else finals[0]
        out = out.transpose(0, 1) if batch_first else out
        if not batched:
            out, finals = out.squeeze(0 if batch_first else 1), [final.squeeze(1) for final in finals]
        return out, tuple(finals) if len(finals) > 1 else finals[0]

    def _initial(self, x: Tensor, batch_sizes: Tensor | None, order: Tensor | None, hx: Any, batched: bool) -> Any:
        """Return the checked initial states, (layers · directions, B, H) each, in the batch's order."""
        module = self.module
        batch = int(batch_sizes[0]) if batch_sizes is not None else x.shape[1]
        count = module.num_layers * (2 if module.bidirectional else 1)
        parts = 2 if module.mode == "LSTM" else 1
        if hx is None:
            states = [x.new_zeros(count, batch, module.hidden_size)] * parts
        else:
            states = list(hx) if parts == 2 else [hx]
            states = states if batched else [state.unsqueeze(1) for state in states]
            states = states if order is None else [state.index_select(1, order) for state in states]
        time_major = x if batch_sizes is not None else x.transpose(0, 1) if module.batch_first else x
        checked: Any = tuple(states) if parts == 2 else states[0]
        module.check_forward_args(time_major, checked, batch_sizes)
        return states

    def _layers(self, x: Tensor, states: list[Tensor], packing: Packing | None) -> tuple[Tensor, list[Tensor]]:
        """Run layer by layer; return the outputs and the final states, (layers · directions, B, H) each."""
        module = self.module
        directions = 2 if module.bidirectional else 1
        finals = []
        # As the module's own forward does: weights that are computed (weight norm) are computed once.
        module._update_flat_weights()
        flat = module._flat_weights
        each = len(flat) // module.num_layers
        for number in range(module.num_layers):
            mine = slice(number * directions, (number + 1) * directions)
            weights = flat[number * each : (number + 1) * each]
            layer = Layer(self.path, number, self.engine, module.mode, directions, packing, self.memory, self.lean)
            x, *final = _LayerFunction.apply(layer, x, *(state[mine] for state in states), *weights)
            finals.append(final)
            if module.dropout and number < module.num_layers - 1:
                x = F.dropout(x, module.dropout, module.training)
        return x, [torch.cat(part) for part in zip(*finals, strict=True)]


def _well_formed(x: Tensor, hx: Any) -> bool:
    """Tell whether ``x`` is a sequence, of a batch or alone, and ``hx`` states to go with it."""
    states = () if hx is None else hx if isinstance(hx, tuple | list) else (hx,)
    return x.dim() in (2, 3) and all(state.dim() == x.dim() for state in states)
