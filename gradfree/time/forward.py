"""Forward passes of a recurrence: by an engine's own method, or step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradfree.chains.chain import Solver
from gradfree.chains.memory import Memory
from gradfree.devices.costs import kept_gates_pay, own_kernel_is_faster
from gradfree.devices.hardware import runs_cudnn, steps_a_call
from gradfree.devices.packed_costs import Layout
from gradfree.time.cell_layer import run_steps, runs_by_units
from gradfree.time.gru_forward import gru_with_gates
from gradfree.time.packing import Packing


@dataclass(frozen=True)
class Recurrence:
    """h_t = f(x_t, h_{t-1}; θ), t = 1..T: inputs, initial state and weights of one layer, before it runs.

    Attributes:
        x: (T, B, I), or the rows of packed sequences, (N, I).
        first: the parts of the initial state, (directions, B, H) each: h_0 and, for LSTM, c_0; those of the ``cell``.
        weights: W_ih, W_hh and, with biases, b_ih, b_hh, for each direction; of a ``cell`` all its parameters.
        mode: of a recurrent module, "RNN_TANH", "RNN_RELU", "GRU" or "LSTM"; ``None`` with a ``cell``.
        cell: the module that computes f; ``None`` for a layer of a recurrent module.
        directions: 1, or 2 for a bidirectional layer.
        packing: positions of the rows of packed sequences; ``None`` if not packed.
        states_only: whether to keep only the states for the backward pass, no gates.
        trains: whether a backward pass follows; otherwise the forward pass remembers its outcome itself.
        memory: the chain's memory from pass to pass.
        paths: the name of each direction's chain in messages and in ``memory``.
    """

    x: Tensor
    first: Sequence[Tensor]
    weights: Sequence[Tensor]
    mode: str | None
    cell: nn.Module | None = None
    directions: int = 1
    packing: Packing | None = None
    states_only: bool = False
    trains: bool = True
    memory: Memory = field(default_factory=Memory)
    paths: Sequence[str] = ("",)

    @property
    def kind(self) -> str:
        """The kind of cell: the :attr:`mode`, "separate units" of an elementwise cell, else "any"."""
        if self.mode is not None:
            return self.mode
        return "separate units" if self.cell is not None and runs_by_units(self.cell) else "any"

    @property
    def cell_path(self) -> str:
        """The path of a cell of a :class:`~gradfree.time.cell_layer.CellLayer`, for messages."""
        return f"{self.paths[0]}.cell".removeprefix(".")

    @property
    def may_keep_gates(self) -> bool:
        """Whether it is a GRU in full precision on a CPU, whose gates may be kept for the backward pass."""
        full = self.x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
        return self.mode == "GRU" and not self.states_only and full and self.x.device.type == "cpu"

    @property
    def is_dense(self) -> bool:
        """Whether sequences have equal lengths (not packed) and states are vectors of real numbers."""
        return self.packing is None and all(part.dim() == 3 and not part.is_complex() for part in self.first)


@dataclass(frozen=True)
class LayerCall:
    """Sizes and names of a layer's call before it runs, for the engine's choice to leave it to torch.

    Attributes:
        mode: see :class:`Recurrence`.
        length: T.
        like: a state, (B, H), of the layer's device and precision.
        layout: how the sequences run if the engine follows the expected costs.
        trains: whether a backward pass follows.
        memory: see :class:`Recurrence`.
        paths: see :class:`Recurrence`.
        warn: issues a warning with the given message, once.
    """

    mode: str
    length: int
    like: Tensor
    layout: Layout
    trains: bool
    memory: Memory
    paths: Sequence[str]
    warn: Callable[[str], None]

    @property
    def is_packed(self) -> bool:
        """Whether these are packed sequences of several lengths, all at once."""
        return self.layout in ("whole", "grid")

    @property
    def torch_is_faster(self) -> bool:
        """Whether both passes are expected to be faster in torch's own kernel than in the closed form."""
        if self.is_packed:
            return self.layout == "whole"
        return own_kernel_is_faster(self.mode, self.length, self.like)


class Trajectory(NamedTuple):
    """The result of running a recurrence.

    Attributes:
        out: h after each step, the directions concatenated; (T, B, ·), or packed if ``x`` is.
        finals: the final states, shaped as :attr:`Recurrence.first`.
        kept: tensors that the backward pass would otherwise recompute: a GRU's
            :class:`~gradfree.time.gru_forward.Gates`, direction after direction, or none; of a cell the other parts
            of the state after each step, (T, B, ·) each.
        passes: for each direction, :attr:`TimeChain.forward_pass`; empty if the engine has no forward of its own.
    """

    out: Tensor
    finals: Sequence[Tensor]
    kept: tuple[Tensor, ...] = ()
    passes: Sequence[object] = ()


Forward = Callable[[Recurrence], Trajectory | None]
"""Runs a recurrence in one direction, without a graph and without changing its tensors.

Returns ``None`` if it does not support the recurrence or is not worth it; that changes nothing and causes no sync, and
is the same for both directions. Engines list theirs in :attr:`Engine.forwards`.
"""


def run_kernel(recurrence: Recurrence) -> Sequence[Tensor]:
    """Run a layer of a recurrent module in torch's own kernel; return the outputs and the final states.

    Sequences with more steps than the kernel takes run in pieces, which pass their states on.
    """
    x, directions = recurrence.x, recurrence.directions
    assert recurrence.mode is not None
    if recurrence.packing is None and (steps := steps_a_call(len(x), x.device)) < len(x):
        in_pieces = _run_each_direction(recurrence, partial(_run_in_pieces, steps))
        assert in_pieces is not None
        return in_pieces.out, *in_pieces.finals
    weights = in_one_piece(recurrence.weights, directions)
    kernel: Any = getattr(torch, recurrence.mode.lower())  # torch.rnn_tanh, rnn_relu, gru or lstm.
    hx = recurrence.first if len(recurrence.first) > 1 else recurrence.first[0]
    # In training, as otherwise cuDNN has no backward pass. Without dropout, nothing else depends on it.
    options = (len(weights) > 2 * directions, 1, 0.0, torch.is_grad_enabled(), directions > 1)
    found: Sequence[Tensor]
    if recurrence.packing is None:
        found = kernel(x, hx, weights, *options, False)
    else:
        found = kernel(x, recurrence.packing.batch_sizes, hx, weights, *options)
    return found


def _run_in_pieces(steps: int, recurrence: Recurrence) -> Trajectory:
    """Run a recurrence in one direction in calls of at most ``steps`` steps."""
    outs, finals = [], recurrence.first
    recurrence = replace(recurrence, weights=in_one_piece(recurrence.weights, 1))
    for x in recurrence.x.split(steps):
        out, *finals = run_kernel(replace(recurrence, x=x, first=finals))
        outs.append(out)
    return Trajectory(torch.cat(outs), finals)


def in_one_piece(weights: Sequence[Tensor], directions: int) -> Sequence[Tensor]:
    """Return ``weights`` of a layer as cuDNN reads them: in one piece of memory, the matrices before the biases.

    The weights of a module of one layer are so. Others are copied by one call, without which torch copies each weight
    at each call, and warns. Where cuDNN does not run, and under autocast, which copies them itself, they are returned.

    Args:
        weights: as :attr:`Recurrence.weights`.
        directions: 1 or 2.
    """
    device = weights[0].device
    if not runs_cudnn(device) or torch.is_autocast_enabled(device.type):
        return weights
    each = len(weights) // directions
    order = sorted(range(len(weights)), key=lambda n: (n % each > 1, n))
    # Room for biases is there without them, too.
    biases = [] if each > 2 else [weights[1].new_zeros(2 * directions * len(weights[1]))]
    sizes = [weights[n].numel() for n in order]
    if weights[0].untyped_storage().nbytes() == weights[0].itemsize * (sum(sizes) + sum(map(len, biases))):
        return weights
    flat = torch.cat([*(weights[n].flatten() for n in order), *biases])
    parts = dict(zip(order, flat[: sum(sizes)].split(sizes), strict=True))
    return [parts[n].view_as(weight) for n, weight in enumerate(weights)]


def run(engine: Solver, recurrence: Recurrence) -> Trajectory:
    """Run ``recurrence`` by the first of the engine's own methods that takes it, else step by step."""
    for forward in engine.forwards:
        if (found := _run_each_direction(recurrence, forward)) is not None:
            return found
    return run_sequentially(recurrence)


def run_sequentially(recurrence: Recurrence) -> Trajectory:
    """Run ``recurrence`` step by step; outputs are bitwise those of torch's layer, or of a loop over the cell."""
    x, first, weights = recurrence.x, recurrence.first, recurrence.weights
    if recurrence.cell is not None:
        steps = run_steps(recurrence.cell, x, [part[0] for part in first], recurrence.cell_path)
        out, *others = (torch.stack(part) for part in zip(*steps, strict=True))
        return Trajectory(out, [part[None] for part in steps[-1]], tuple(others))
    if _keeps_gates(recurrence):
        return _run_keeping_gates(recurrence)
    if recurrence.mode == "LSTM" and x.device.type == "cpu" and x.dtype is not torch.float64:
        # With gradients off, torch runs another oneDNN LSTM, which rounds differently. Detached inputs leave no graph.
        given = [[part.detach() for part in parts] for parts in ([x], first, weights)]
        with torch.enable_grad():
            out, *finals = run_kernel(replace(recurrence, x=given[0][0], first=given[1], weights=given[2]))
    else:
        out, *finals = run_kernel(recurrence)
    return Trajectory(out, finals)


def _keeps_gates(recurrence: Recurrence) -> bool:
    """Return whether to keep the gates: a GRU that is wide enough, of sequences of equal length."""
    equal = recurrence.packing is None
    return equal and recurrence.may_keep_gates and kept_gates_pay(recurrence.x, recurrence.weights[1].shape[1])


def _run_keeping_gates(recurrence: Recurrence) -> Trajectory:
    each = len(recurrence.weights) // recurrence.directions
    outs: list[Tensor] = []
    kept: list[Tensor] = []
    for d, (h, *_) in enumerate(zip(*recurrence.first, strict=True)):
        weights = recurrence.weights[d * each : (d + 1) * each]
        out, gates = gru_with_gates(recurrence.x, h, weights, reverse=d == 1)
        outs.append(out)
        kept += gates
    finals = [torch.stack([out[-1] for out in outs])]
    whole = outs[0] if len(outs) == 1 else torch.cat([outs[0], outs[1].flip(0)], -1)
    return Trajectory(whole, finals, tuple(kept))


def _run_each_direction(recurrence: Recurrence, forward: Forward) -> Trajectory | None:
    """Run each direction by ``forward``, the reverse one on flipped sequences; ``None`` if it does not take them."""
    if recurrence.directions == 1:
        return forward(recurrence)
    each = len(recurrence.weights) // recurrence.directions
    runs = []
    for d in range(recurrence.directions):
        found = forward(
            replace(
                recurrence,
                x=recurrence.x.flip(0) if d else recurrence.x,
                first=[part[d : d + 1] for part in recurrence.first],
                weights=recurrence.weights[d * each : (d + 1) * each],
                directions=1,
                paths=recurrence.paths[d : d + 1],
            )
        )
        if found is None:
            return None
        runs.append(found)
    outs = [found.out.flip(0) if direction else found.out for direction, found in enumerate(runs)]
    finals = [torch.cat(part) for part in zip(*(found.finals for found in runs), strict=True)]
    # One direction alone may have kept its gates.
    kept = tuple(part for found in runs for part in found.kept) if all(found.kept for found in runs) else ()
    return Trajectory(torch.cat(outs, -1), finals, kept, [each_pass for found in runs for each_pass in found.passes])
