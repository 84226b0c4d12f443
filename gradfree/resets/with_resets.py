"""``run_with_resets``: a recurrent layer over sequences with resets, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence

from gradfree.devices.packed_costs import in_calls
from gradfree.errors import ChainError
from gradfree.resets.pieces import PieceBatch, Pieces, final_states, in_sequence_order
from gradfree.time.cell_layer import CellLayer, has_hooks, state_problems
from gradfree.time.forward import Recurrence, run_kernel
from gradfree.time.runs import can_keep_c, keeping_c, run_forwards, runs_of
from gradfree.time.torch_layer_site import RecurrentRecorder, RunLayer, recorder_on, run_layers


def run_with_resets(layer: nn.Module, input: Tensor, state: Any, resets: Tensor) -> tuple[Tensor, Any]:
    """Run a recurrent layer over sequences whose state is reset in the middle, in one call.

    Outputs, final states and gradients are those of a loop that calls the layer step by step, and sets the state to
    zero before each step with a reset. The pieces between resets run as one batch. If an engine is attached to the
    layer, it computes their gradients.

    Args:
        layer: an ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM`` in one direction, or a :class:`CellLayer`.
        input: (T, B, I), or (B, T, I) if the layer is ``batch_first``.
        state: the initial state, as the layer takes it. ``None``: zeros.
        resets: bool, (T, B), or (B, T) if the layer is ``batch_first``: whether to reset the state before the step.

    Returns:
        The outputs and the final state, as the layer returns them.

    Raises:
        TypeError: another kind of layer, packed sequences, or resets that are not a bool tensor.
        ValueError: resets or a state with a wrong shape or device.
        ChainError: a layer that is bidirectional, or has projections, hooks or another ``forward``.
    """
    _check_layer(layer)
    _check_input(layer, input, resets)
    x = input.transpose(0, 1) if layer.batch_first else input
    if isinstance(layer, CellLayer):
        parts = list(layer.initial_parts(x, state))
        for problem in state_problems("run_with_resets", parts, x):
            raise ValueError(problem)
    else:
        parts = [part.transpose(0, 1) for part in _checked_state(layer, input, state)]
    if len(x) == 1:
        return _run_one_step(layer, input, parts, resets, isinstance(state, tuple))
    _refuse_stream(layer)
    pieces = Pieces.from_resets(resets.t() if layer.batch_first else resets)
    batches = list(pieces.batches())
    if run := _padded_runner(layer, x, batches):
        found = [run(rows.gather(x), [rows.initial_states(part) for part in parts], rows) for rows in batches]
    else:
        batches = [pieces.batch_of(pieces.length.argsort(descending=True, stable=True))]
        found = [_run_packed(layer, x, parts, rows) for rows in batches]
    outs, *ends = zip(*found, strict=True)
    out = in_sequence_order(outs, batches, (x.shape[0], x.shape[1]))
    finals = tuple(final_states(part, batches) for part in ends)
    if isinstance(layer, CellLayer):
        finals = finals[layer.extra_outputs :]
    else:
        finals = tuple(part.transpose(0, 1) for part in finals)
    single = len(finals) == 1 and not isinstance(state, tuple)
    return out.transpose(0, 1) if layer.batch_first else out, finals[0] if single else finals


def _run_one_step(layer: Any, input: Tensor, parts: Sequence[Tensor], resets: Tensor, several: bool) -> Any:
    """Call the layer once with the masked state: a fast path for agents that act step by step."""
    kept = [part.masked_fill(resets.view(-1, *[1] * (part.dim() - 1)), 0.0) for part in parts]
    if isinstance(layer, CellLayer):
        kept = kept[layer.extra_outputs :]
    else:
        kept = [part.transpose(0, 1).contiguous() for part in kept]
    return layer(input, tuple(kept) if several or len(kept) > 1 else kept[0])


def _padded_runner(
    layer: Any, x: Tensor, batches: Sequence[PieceBatch]
) -> Callable[[Tensor, list[Tensor], PieceBatch], Sequence[Tensor]] | None:
    """Return a function that runs padded pieces; ``None`` if pieces run packed."""
    if isinstance(layer, CellLayer):
        return lambda x, first, rows: layer.unroll(x, first, rows.padding(x.device))
    recorder = _solving(layer)
    # Engines with their own forward method need padded sequences. Approximate engines would count the padding.
    if x.device.type != "cpu" or recorder is None or not recorder.attachment.engine.forwards:
        return None
    longest, rows = batches[0].valid.shape
    if recorder.leaves_to_torch(x[:longest], rows):
        return None
    if layer.mode == "LSTM" and not all(map(can_keep_c, layer.all_weights)):
        return None
    return partial(_run_padded, layer, recorder.run_layer)


def _solving(layer: nn.Module) -> RecurrentRecorder | None:
    """Return the recorder that runs the layer in this pass, if any."""
    recorder = recorder_on(layer)
    return recorder if recorder and (torch.is_grad_enabled() or recorder.attachment.engine.evaluates) else None


def _refuse_stream(layer: Any) -> None:
    """Raise if pieces would be taken for the sequences of the call before; a :class:`CellLayer` refuses padding."""
    recorder = None if isinstance(layer, CellLayer) else _solving(layer)
    if recorder is not None and recorder.attachment.engine.continues:
        raise ChainError(
            f"run_with_resets: {recorder.attachment.engine!r} goes on from the call before, which must be of the same "
            "sequences, not of pieces. Call the layer on chunks of them, or use stream=False."
        )


def _run_packed(layer: Any, x: Tensor, parts: Sequence[Tensor], rows: PieceBatch) -> tuple[Tensor, ...]:
    """Run the layer on rows sorted by length; return the packed outputs and the final states."""
    index = rows.index[rows.valid].to(x.device)
    data, sizes = x.flatten(0, 1).index_select(0, index), rows.valid.sum(1)
    first = [rows.initial_states(part).transpose(0, 1).contiguous() for part in parts]
    if x.device.type == "cpu" and _solving(layer) is None:
        like, trains = data.new_empty(int(sizes[0]), layer.hidden_size), torch.is_grad_enabled()
        calls = in_calls(layer.mode, runs_of(sizes), like, data.shape[1], trains)

        def call(x: Tensor, first: Sequence[Tensor], weights: Sequence[Any]) -> Sequence[Tensor]:
            return run_kernel(Recurrence(x, first, weights, layer.mode))

        out, finals = run_layers(layer, lambda number, *given: run_forwards(call, calls, *given), data, first)
    else:
        packed, final = layer(PackedSequence(data, sizes), tuple(first) if len(first) > 1 else first[0])
        out, finals = packed.data, [*final] if isinstance(final, tuple) else [final]
    return out, *(part.transpose(0, 1) for part in finals)


def _run_padded(layer: Any, run: RunLayer, x: Tensor, parts: Sequence[Tensor], rows: PieceBatch) -> tuple[Tensor, ...]:
    """Run layer by layer, as the module does; return the outputs and the final states, (N, layers, H)."""
    padding = rows.padding(x.device)
    is_padding = None if rows.valid.all() else (~padding.valid).to(x.dtype)

    def run_rows(number: int, x: Tensor, first: Sequence[Tensor], weights: Sequence[Any]) -> Sequence[Tensor]:
        if layer.mode == "LSTM" and is_padding is not None:
            # The kernel returns c of the last step only.
            x = torch.cat([x.masked_fill(~padding.valid, 0.0), is_padding], -1)
            weights = keeping_c(weights, layer.hidden_size)
        out, _, *c = run(number, x, first, weights)
        return out, padding.last_steps(out)[None], *c

    out, finals = run_layers(layer, run_rows, x, [part.transpose(0, 1) for part in parts])
    return out, *(final.transpose(0, 1) for final in finals)


def _check_layer(layer: Any) -> None:
    if isinstance(layer, nn.RNNBase):
        if layer.bidirectional:
            raise ChainError(
                "run_with_resets: the layer runs in both directions. Its reverse direction would carry a later "
                "episode into an earlier one. Use bidirectional=False."
            )
        if layer.proj_size:
            raise ChainError(f"run_with_resets: the layer has proj_size={layer.proj_size}. Use proj_size=0.")
        changed = type(layer).forward not in {nn.RNN.forward, nn.GRU.forward, nn.LSTM.forward}
    elif isinstance(layer, CellLayer):
        changed = type(layer).forward is not CellLayer.forward
        if any(isinstance(part, _BatchNorm) and part.training for part in layer.cell.modules()):
            raise ChainError(
                "run_with_resets: the cell normalises over the batch, which would be the pieces. Call eval() on its "
                "batch normalization, or call the layer step by step."
            )
    else:
        raise TypeError(
            "run_with_resets: layer must be an nn.RNN, nn.GRU, nn.LSTM or gradfree.CellLayer, not "
            f"{type(layer).__name__}."
        )
    changed = changed or ("forward" in vars(layer) and recorder_on(layer) is None)
    if changed or has_hooks(layer):
        what = "another forward" if changed else "hooks"
        raise ChainError(
            f"run_with_resets: the {type(layer).__name__} has {what}. It would run on batches of pieces, not on your "
            "sequences. Remove it, or call the layer step by step."
        )


def _check_input(layer: Any, input: Any, resets: Any) -> None:
    if not isinstance(input, Tensor):
        kind = "a PackedSequence" if isinstance(input, PackedSequence) else type(input).__name__
        raise TypeError(f"run_with_resets: input must be a tensor of sequences of one length, not {kind}.")
    layout = "(B, T, I), as the layer is batch_first" if layer.batch_first else "(T, B, I)"
    if input.dim() != 3 or 0 in input.shape[:2]:
        raise ValueError(
            f"run_with_resets: input must be {layout}, with one step and one sequence at least, not "
            f"{tuple(input.shape)}."
        )
    if not isinstance(resets, Tensor) or resets.dtype is not torch.bool:
        kind = f"of {resets.dtype}" if isinstance(resets, Tensor) else type(resets).__name__
        raise TypeError(f"run_with_resets: resets must be a tensor of torch.bool, not {kind}.")
    if resets.shape != input.shape[:2]:
        raise ValueError(
            f"run_with_resets: resets must be {tuple(input.shape[:2])}, as input is {layout}, not "
            f"{tuple(resets.shape)}."
        )
    if resets.device != input.device:
        raise ValueError(f"run_with_resets: resets are on {resets.device}, but input is on {input.device}.")


def _checked_state(layer: Any, input: Tensor, state: Any) -> list[Tensor]:
    """Return the parts of the initial state, (layers, B, H) each."""
    count = 2 if layer.mode == "LSTM" else 1
    batch = input.shape[0 if layer.batch_first else 1]
    if state is None:
        parts = [input.new_zeros(layer.num_layers, batch, layer.hidden_size)] * count
    else:
        parts = list(state) if count == 2 and isinstance(state, tuple | list) else [state]
    if len(parts) != count or not all(isinstance(part, Tensor) and part.dim() == 3 for part in parts):
        what = "a tuple of two tensors" if count == 2 else "a tensor"
        raise ValueError(f"run_with_resets: the state must be {what} (layers, B, H), as the layer takes it.")
    try:
        layer.check_forward_args(input, tuple(parts) if count == 2 else parts[0], None)
    except RuntimeError as error:
        raise ValueError(f"run_with_resets: {error}.") from None
    return parts
