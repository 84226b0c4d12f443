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

from gradfree.chains.report import path_name
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.devices.hardware import runs_cudnn, steps_a_call
from gradfree.errors import ATTACHED, ChainError
from gradfree.time.forward import LayerCall, Recurrence, SingleStepWarning, run_kernel
from gradfree.time.fused_layer import FusedLayer, LayerFunction, chain_paths
from gradfree.time.packing import Packing
from gradfree.torchside.guards import refuse_transforms
from gradfree.torchside.hooks import when_backward
from gradfree.torchside.private import uncompiled
from gradfree.torchside.unsaved import Unsaved

RunLayer = Callable[[int, Tensor, Sequence[Tensor], Sequence[Any]], Sequence[Tensor]]
"""Maps a layer's number, input, initial states and weights to its outputs and final states."""


class Recurrent(Site):
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
            yield f"{self.path} has a forward on the instance. Remove it while an engine is attached."
        if module.proj_size:
            yield f"{path_name(self.path)} has proj_size={module.proj_size}, which no engine supports. Use proj_size=0."

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
        module = self.module
        if not torch.is_grad_enabled() and self._takes(input):
            return self._run_torch(input, hx)
        refuse_transforms(self.attachment.path or "the layer")
        packed = isinstance(input, PackedSequence)
        x: Any
        x, batch_sizes, order, back = input if packed else (input, None, None, None)
        if not packed and not _well_formed(x, hx):
            return self._run_torch(input, hx)  # Raises torch's own error.
        self._has_recorded = True
        batched, batch_first = packed or x.dim() == 3, module.batch_first and not packed
        # Same layout as in the module itself, as the rounding of matrix products depends on it.
        x = x if batched else x.unsqueeze(0 if batch_first else 1)
        x = x.transpose(0, 1) if batch_first else x
        length, batch = x.shape[:2] if batch_sizes is None else (len(batch_sizes), int(batch_sizes[0]))
        # Packed sequences of equal length have the memory layout of an ordinary batch.
        ragged = batch_sizes is not None and int(batch_sizes[-1]) != batch
        self.single_steps.count(length)
        like = x.new_empty(batch, module.hidden_size)
        left = [self._leave_to_torch(number, length, like, ragged) for number in range(module.num_layers)]
        if None not in left and self._takes(input):
            callbacks = [callback for of_layer in left for callback in of_layer or ()]
            out, final = self._run_torch(input, hx)
            last = final if isinstance(final, tuple) else (final,)
            when_backward((out.data if packed else out, *last), callbacks)
            return out, final
        states = self._initial(x, batch, batch_sizes, order, hx, batched)
        packing = Packing(batch_sizes, x.device) if batch_sizes is not None and ragged else None
        if packed and not ragged:
            x = x.unflatten(0, (length, batch))
        out, finals = run_layers(module, partial(self.run_layer, packing=packing), x, states)
        finals = [final if back is None else final.index_select(1, back) for final in finals]
        if packed:
            out = out if ragged else out.flatten(0, 1)
            return PackedSequence(out, batch_sizes, order, back), tuple(finals) if len(finals) > 1 else finals[0]
        out = out.transpose(0, 1) if batch_first else out
        if not batched:
            out, finals = out.squeeze(0 if batch_first else 1), [final.squeeze(1) for final in finals]
        return out, tuple(finals) if len(finals) > 1 else finals[0]

    def _takes(self, input: Any) -> bool:
        """Return whether torch's own ``forward`` takes the input: cuDNN refuses long sequences, and evaluation mode."""
        packed = isinstance(input, PackedSequence)
        x = input.data if packed else input
        if not isinstance(x, Tensor) or x.dim() not in (2, 3) or not runs_cudnn(x.device):
            return True
        length = 0 if packed else x.shape[int(self.module.batch_first and x.dim() == 3)]
        trains = self.module.training or not torch.is_grad_enabled()
        return trains and steps_a_call(length, x.device) == length

    def _run_torch(self, input: Any, hx: Any) -> Any:
        return self._torch_class.forward(self.module, input, hx)

    def _leave_to_torch(self, number: int, length: int, like: Tensor, ragged: bool) -> list[Callable[[], None]] | None:
        """Return callbacks for the backward pass if the engine leaves this layer to torch's kernel, else ``None``."""
        at = self.attachment
        # Comparisons and surveys need the chain.
        if at.compares or at.surveys is not None:
            return None
        kind = like.device.type
        if torch.is_autocast_enabled(kind) and like.dtype is torch.float32:
            # The precision of torch's kernel.
            like = torch.empty_like(like, dtype=torch.get_autocast_dtype(kind))
        layer = self._layers[number]
        callbacks = at.engine.leave_to_torch(
            LayerCall(layer.mode, length, like, ragged, at.memory, layer.paths, self._warn_once)
        )
        if callbacks is None:
            return None
        return [*callbacks] if at.path in at.solved else [*callbacks, partial(at.solved.add, at.path)]

    def _warn_once(self, message: str) -> None:
        if not self._has_warned and not self.attachment.has_rivals:
            self._has_warned = True
            warnings.warn(f"{self.attachment.path or 'the recurrent layer'}: {message}", stacklevel=2)

    def _initial(
        self, x: Tensor, batch: int, batch_sizes: Tensor | None, order: Tensor | None, hx: Any, batched: bool
    ) -> Any:
        """Return the checked initial states, (layers · directions, B, H) each, in the batch's order."""
        module = self.module
        count = module.num_layers * (2 if module.bidirectional else 1)
        parts = 2 if module.mode == "LSTM" else 1
        if hx is None:
            states = [x.new_zeros(count, batch, module.hidden_size)] * parts
        else:
            states = list(hx) if parts == 2 else [hx]
            states = states if batched else [state.unsqueeze(1) for state in states]
            states = states if order is None else [state.index_select(1, order) for state in states]
        as_given = x.transpose(0, 1) if module.batch_first and batch_sizes is None else x
        checked: Any = tuple(states) if parts == 2 else states[0]
        module.check_forward_args(as_given, checked, batch_sizes)
        return states

    def run_layer(
        self, number: int, x: Tensor, first: Sequence[Tensor], weights: Sequence[Any], packing: Packing | None = None
    ) -> Sequence[Tensor]:
        """Run a layer, recorded or by torch; return the outputs and the final states, (directions, B, H) each."""
        length = len(x) if packing is None else packing.shape[0]
        graph = torch.is_grad_enabled()
        callbacks = self._leave_to_torch(number, length, first[0][0], packing is not None) if graph else []
        layer = self._layers[number]
        if callbacks is None:
            applied: Sequence[Tensor] = LayerFunction.apply(replace(layer, packing=packing), x, *first, *weights)
            return applied
        found = run_kernel(Recurrence(x, first, weights, layer.mode, directions=len(layer.paths), packing=packing))
        when_backward(found, callbacks)
        return found


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


def _well_formed(x: Tensor, hx: Any) -> bool:
    """Return whether ``x`` has two or three dimensions (one sequence, or a batch), and ``hx`` as many."""
    states = () if hx is None else hx if isinstance(hx, tuple | list) else (hx,)
    return x.dim() in (2, 3) and all(state.dim() == x.dim() for state in states)
