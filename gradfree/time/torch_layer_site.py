"""Recorder of torch's recurrent modules: each layer and direction becomes one chain in time.

Replaces the module's ``forward`` on the instance. The replacement runs torch's fused kernel layer by layer, without a
graph, inside an autograd function. The backward pass of this function calls the engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradfree.chains.chain import Solver
from gradfree.chains.report import path_name
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.devices.costs import SHORTEST, SHORTEST_EVALUATED
from gradfree.devices.hardware import runs_cudnn, steps_a_call
from gradfree.devices.packed_costs import Layout, in_calls, packed_layout
from gradfree.errors import ATTACHED, ChainError
from gradfree.time.forward import LayerCall, run, run_kernel
from gradfree.time.layer_input import CallKey, LayerInput, key_of, length_of, tensor_of, well_formed
from gradfree.time.layout_report import offer_layout
from gradfree.time.packing import Packing
from gradfree.time.runs import Run, run_backwards, run_forwards
from gradfree.time.single_steps import SingleStepWarning
from gradfree.time.torch_layer_pass import FusedLayer, LayerFunction, chain_paths
from gradfree.torchside.guards import refuse_transforms
from gradfree.torchside.hooks import when_backward
from gradfree.torchside.private import is_simulated, is_traced, other_pass, transforms_active, uncompiled
from gradfree.torchside.unsaved import Unsaved

LeftToTorch = Sequence[Callable[[], None]] | None
"""Callbacks for the backward pass of a layer that the engine leaves to torch's kernel; ``None`` if it does not."""

_MOST_LEFT = 256
"""How many keys of calls left to torch are kept, about which the engine is not asked again."""

RunLayer = Callable[[int, Tensor, Sequence[Tensor], Sequence[Any]], Sequence[Tensor]]
"""Maps a layer's number, input, initial states and weights to its outputs and final states."""


class TorchLayerSite(Site):
    """An ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``: a chain in time for each of its layers and directions."""

    dimension = "time"
    several = True
    looks_like = "an nn.RNN, nn.GRU or nn.LSTM"

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Return whether ``module`` is one of torch's recurrent modules."""
        return isinstance(module, nn.RNN | nn.GRU | nn.LSTM)

    @property
    def has_residual(self) -> bool:
        """Whether the cell has a gate."""
        return not isinstance(self._module, nn.RNN)

    def means(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the gate's mean for each layer and direction: the gate of h or, for LSTM, of c."""
        part = int(self._module.mode == "LSTM")
        layers = [chain_paths(self.path, n, 1 + self._module.bidirectional) for n in range(self._module.num_layers)]
        return {f"{path}.{part}": (self._module.hidden_size,) for paths in layers for path in paths}

    @classmethod
    def attachment_on(cls, module: nn.Module) -> Attachment | None:
        """Return the attachment of the recorder that replaces the module's ``forward``; ``None`` if there is none."""
        recorder = recorder_on(module)
        return None if recorder is None else recorder.attachment

    def problems(self) -> Iterator[str]:
        """Yield what prevents attaching an engine to the module."""
        module = self._module
        if self.attachment_on(module):
            yield ATTACHED.message(path=self.path or "the model")
        elif "forward" in vars(module):
            yield (
                f"{path_name(self.path)} has a forward on the instance, which an engine would replace. Remove it while "
                "an engine is attached."
            )

    def problems_when_linearised(self) -> Iterator[str]:
        """Yield that only engines with ``loops`` take layers with projections, which they leave to torch."""
        if size := self._module.proj_size:
            yield (
                f"{path_name(self.path)} has proj_size={size}, which only 'shooting', 'newton', 'backprop' and 'auto' "
                "take: they leave the layer to torch. Use one of them, proj_size=0, or leave the layer out: "
                "chains=[...]."
            )

    def record(self, attachment: Attachment) -> list[Removable]:
        """Replace the module's forward."""
        recorder = RecurrentRecorder(attachment, self._module)
        self._module.forward = recorder.forward
        return [recorder, Unsaved(self._module, {"forward"})]

    @property
    def _module(self) -> nn.RNNBase:
        return self.blocks[self.path]  # type: ignore[return-value]

    def __str__(self) -> str:
        layers = "1 layer" if self._module.num_layers == 1 else f"{self._module.num_layers} layers"
        return f"{self._module.mode}, {layers}{' in both directions' if self._module.bidirectional else ''}, in time"


class RecurrentRecorder:
    """Replaces the ``forward`` of an ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``, or of a subclass that calls theirs."""

    def __init__(self, attachment: Attachment, module: nn.RNNBase):
        self.attachment, self.module = attachment, module
        self.single_steps = SingleStepWarning(attachment.path)
        self._torch_class = torch_layer_class(type(module))
        self._has_recorded = self._has_warned = False
        self._left: dict[CallKey | None, Solver] = {}
        paths = (chain_paths(attachment.path, n, 1 + module.bidirectional) for n in range(module.num_layers))
        self._layers = [FusedLayer(attachment, n, module.mode, own) for n, own in enumerate(paths)]

    def remove(self) -> None:
        """Restore the module's own ``forward``."""
        del self.module.forward

    # The compiler would unroll the steps, which takes minutes. It leaves torch's own recurrent layers out, too.
    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the same as the module's own ``forward``: bitwise, or to the tolerance of the engine's own forward."""
        kind: Any = type(self.module)
        if kind.forward is self._torch_class.forward:
            return self.record(*args, **kwargs)
        # An object that shares the module's attributes, of a subclass in which super().forward calls ``record``.
        module = object.__new__(_with_recorded_super(kind))
        module.__dict__ = self.module.__dict__
        result = kind.forward(module, *args, **kwargs)
        if torch.is_grad_enabled() and not self._has_recorded:
            raise ChainError(
                f"{self.attachment.path or 'the model'} is a {kind.__name__} whose forward does not call "
                f"the forward of {self._torch_class.__name__} (super().forward), which the engine needs. Attach the "
                "engine to other modules: chains=[...]."
            )
        return result

    def record(self, input: Any, hx: Any = None) -> Any:
        """Return the same as torch's own ``forward``, with the layers recorded for the engine."""
        at, trains = self.attachment, torch.is_grad_enabled()
        self._has_recorded |= trains
        if self.module.proj_size:
            return self._leave(input, hx, [])
        takes = self._takes(input)
        if not trains and takes and not self._evaluates(input):
            return self._run_torch(input, hx)
        refuse_transforms(at.path or "the layer")
        # Comparisons and surveys need the whole chain.
        watched = at.compares or at.surveys is not None or at.deltas is not None
        key = key_of(self.module, input)
        if takes and not watched and self._left.get(key) is at.engine:
            self._count(input, trains)
            return self._leave(input, hx, [])
        if not well_formed(input, hx):
            return self._run_torch(input, hx)  # Raises torch's own error.
        given = LayerInput(self.module, input)
        self._count(input, trains)
        usual = self._layout(given)
        layout: Layout = "grid" if given.ragged and watched else usual
        calls = self._calls(given, hx) if usual == "runs" else []
        if given.ragged:
            # A survey is asked what other passes do.
            offer_layout(at.path, layout if at.surveys is None else usual, len(calls))
        if layout == "runs":
            run_layer: RunLayer = partial(self._run_in_runs, calls)
        else:
            left = [self._leave_to_torch(layer, given.length, given.like, layout) for layer in self._layers]
            if None not in left and takes:
                callbacks = [each for own in left for each in own or ()]
                if key is not None and not (callbacks or given.ragged):
                    if len(self._left) == _MOST_LEFT:
                        self._left.clear()
                    self._left[key] = at.engine
                return self._leave(input, hx, callbacks)
            packing = Packing(input.batch_sizes, given.x.device) if given.ragged else None
            run_layer = partial(self._run_decided, left, packing)
        out, finals = run_layers(self.module, run_layer, given.x, given.initial_states(hx))
        if layout == "runs":
            self._after_torch([out, *finals], [])
        return given.result(out, finals)

    def _takes(self, input: Any) -> bool:
        """Return whether torch's own ``forward`` takes the input: cuDNN refuses long sequences, and evaluation mode."""
        packed, x = isinstance(input, PackedSequence), tensor_of(input)
        if not isinstance(x, Tensor) or x.dim() not in (2, 3) or not runs_cudnn(x.device):
            return True
        length = 0 if packed else length_of(self.module, input)
        trains = self.module.training or not torch.is_grad_enabled()
        return trains and steps_a_call(length, x.device) == length

    def _evaluates(self, input: Any) -> bool:
        """Return whether the engine may be faster than torch without gradients."""
        engine, packed = self.attachment.engine, isinstance(input, PackedSequence)
        if not packed and input.dim() not in (2, 3):
            return False
        # First, as single steps are the most frequent calls.
        if length_of(self.module, input) < SHORTEST_EVALUATED:
            return False
        if not engine.evaluates or is_traced() or transforms_active() or other_pass() is not None:
            return False
        return packed or bool(engine.forwards)

    def _count(self, input: Any, trains: bool) -> None:
        """Count a call with gradients, until one has several steps."""
        if trains and self.single_steps.remaining:
            self.single_steps.count(length_of(self.module, input))

    def _run_torch(self, input: Any, hx: Any) -> Any:
        return self._torch_class.forward(self.module, input, hx)

    def _leave(self, input: Any, hx: Any, callbacks: Sequence[Callable[[], None]]) -> Any:
        """Run the whole module by torch, and ``callbacks`` in its backward pass."""
        out, final = self._run_torch(input, hx)
        finals = final if isinstance(final, tuple) else (final,)
        self._after_torch((tensor_of(out), *finals), callbacks)
        return out, final

    def _layout(self, given: LayerInput) -> Layout:
        at, module = self.attachment, self.module
        if not given.ragged:
            return "batch"
        if not at.engine.solves_pieces:
            return "grid"
        return packed_layout(module.mode, given.runs, given.like, given.x.shape[1], trains=torch.is_grad_enabled())

    def _calls(self, given: LayerInput, hx: Any) -> Sequence[Sequence[Run]]:
        """Return the runs of packed sequences, those together that are one call."""
        module = self.module
        if module.bidirectional and hx is not None:
            # In the reverse direction padding comes first, and does not keep h.
            return [[run] for run in given.runs]
        return in_calls(module.mode, given.runs, given.like, given.x.shape[1], trains=torch.is_grad_enabled())

    def _leave_to_torch(self, layer: FusedLayer, length: int, like: Tensor, layout: Layout) -> LeftToTorch:
        """Decide whether the engine leaves this layer to torch's kernel."""
        at, kind, trains = self.attachment, like.device.type, torch.is_grad_enabled()
        if not trains and not at.engine.evaluates:
            return ()
        if is_simulated(like):
            return ()
        # Comparisons and surveys need the chain.
        if at.compares or at.surveys is not None:
            return None
        if torch.is_autocast_enabled(kind) and like.dtype is torch.float32:
            # The precision of torch's kernel.
            like = torch.empty_like(like, dtype=torch.get_autocast_dtype(kind))
        call = LayerCall(layer.mode, length, like, layout, trains, at.memory, layer.paths, self._warn_once)
        return at.engine.leave_to_torch(call)

    def _after_torch(self, outputs: Sequence[Tensor], calls: Sequence[Callable[[], None]]) -> None:
        """Call each of ``calls`` in the backward pass of ``outputs``; at once if gradients are disabled."""
        at = self.attachment
        if not torch.is_grad_enabled():
            for call in calls:
                call()
        elif at.path in at.solved:
            when_backward(outputs, calls)
        else:
            when_backward(outputs, [*calls, partial(at.solved.add, at.path)])

    def _warn_once(self, message: str) -> None:
        if not self._has_warned and not self.attachment.has_rivals:
            self._has_warned = True
            warnings.warn(f"{self.attachment.path or 'the recurrent layer'}: {message}", stacklevel=2)

    def run_layer(self, number: int, x: Tensor, first: Sequence[Tensor], weights: Sequence[Any]) -> Sequence[Tensor]:
        """Run a layer, recorded or by torch; return the outputs and the final states, (directions, B, H) each."""
        layer = self._layers[number]
        return self._run(layer, self._leave_to_torch(layer, len(x), first[0][0], "batch"), x, first, weights)

    def _run_decided(
        self,
        left: Sequence[LeftToTorch],
        packing: Packing | None,
        number: int,
        x: Tensor,
        first: Sequence[Tensor],
        weights: Sequence[Any],
    ) -> Sequence[Tensor]:
        """Run a layer by the decisions ``left``, one for each layer; as :meth:`run_layer`."""
        return self._run(replace(self._layers[number], packing=packing), left[number], x, first, weights)

    def _run_in_runs(
        self,
        calls: Sequence[Sequence[Run]],
        number: int,
        x: Tensor,
        first: Sequence[Tensor],
        weights: Sequence[Any],
    ) -> Sequence[Tensor]:
        """Run a layer on packed rows, each direction in runs; as :meth:`run_layer`."""
        layer = self._layers[number]
        each = len(weights) // len(layer.paths)
        found = []
        for d, run_direction in zip(range(len(layer.paths)), (run_forwards, run_backwards), strict=False):
            own = replace(layer, paths=layer.paths[d : d + 1])
            mine = weights[d * each : (d + 1) * each]
            found.append(
                run_direction(partial(self._run_piece, own), calls, x, [part[d : d + 1] for part in first], mine)
            )
        outs, *finals = zip(*found, strict=True)
        whole = found[0] if len(found) == 1 else [torch.cat(outs, -1), *map(torch.cat, finals)]
        # Under autocast torch's LSTM has the state's dtype for packed rows, and another one for a padded batch.
        return [part.to(first[0].dtype) for part in whole] if layer.mode == "LSTM" else whole

    def _run_piece(
        self, layer: FusedLayer, x: Tensor, first: Sequence[Tensor], weights: Sequence[Any]
    ) -> Sequence[Tensor]:
        """Run one direction of a layer in one call; no engine is faster than torch on a short one."""
        if len(x) >= SHORTEST:
            return self._run(layer, self._leave_to_torch(layer, len(x), first[0][0], "runs"), x, first, weights)
        return run_kernel(layer.recurrence(x, first, weights))

    def _run(
        self, layer: FusedLayer, left: LeftToTorch, x: Tensor, first: Sequence[Tensor], weights: Sequence[Any]
    ) -> Sequence[Tensor]:
        if left is not None:
            found = run_kernel(layer.recurrence(x, first, weights))
            self._after_torch(found, left)
        elif torch.is_grad_enabled():
            found = LayerFunction.apply(layer, x, *first, *weights)
        else:
            trajectory = run(self.attachment.engine, layer.recurrence(x, first, weights, trains=False))
            found = [trajectory.out, *trajectory.finals]
        return found

    def leaves_to_torch(self, x: Tensor, batch: int) -> bool:
        """Return whether the engine leaves all layers to torch for ``x`` (T, ·, I) in batches of ``batch``."""
        like = x.new_empty(batch, self.module.hidden_size)
        return all(self._leave_to_torch(layer, len(x), like, "batch") is not None for layer in self._layers)


def recorder_on(module: nn.Module) -> RecurrentRecorder | None:
    """Return the recorder that replaces the ``forward`` of ``module``; ``None`` if no engine is attached."""
    recorder = getattr(vars(module).get("forward"), "__self__", None)
    return recorder if isinstance(recorder, RecurrentRecorder) else None


def torch_layer_class(kind: type[nn.RNNBase]) -> type[nn.RNNBase]:
    """Return the class among ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` that ``kind`` derives from."""
    return next(own for own in (nn.RNN, nn.GRU, nn.LSTM) if issubclass(kind, own))


def run_layers(module: nn.RNNBase, run: RunLayer, x: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Run layer by layer; return the outputs and the final states, (layers · directions, B, H) each."""
    directions = 2 if module.bidirectional else 1
    finals = []
    # As in the module's own forward: computes parametrised weights (weight norm) once.
    module._update_flat_weights()
    flat: list[Any] = module._flat_weights
    each = len(flat) // module.num_layers
    for number in range(module.num_layers):
        mine = slice(number * directions, (number + 1) * directions)
        x, *final = run(number, x, [state[mine] for state in states], flat[number * each : (number + 1) * each])
        finals.append(final)
        if module.dropout and number < module.num_layers - 1:
            x = F.dropout(x, module.dropout, module.training)
    return x, [torch.cat(part) for part in zip(*finals, strict=True)]


@cache
def _with_recorded_super(kind: Any) -> Any:
    """Return a subclass of ``kind`` in which ``super().forward`` calls :meth:`RecurrentRecorder.record`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["forward"].__self__.record(*args, **kwargs)

    between = type(kind)("Recorded", (torch_layer_class(kind),), {"forward": forward})
    return type(kind)(kind.__name__, (kind, between), {})
