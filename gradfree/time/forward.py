"""Ways to run a recurrence forward: which there are, and which one runs."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradfree.chains.chain import Solver
from gradfree.chains.memory import Memory
from gradfree.devices.costs import kept_gates_pay
from gradfree.time.cell_layer import ElementwiseCell, run_steps
from gradfree.time.gru_forward import gru_with_gates
from gradfree.time.packing import Packing


@dataclass(frozen=True)
class Recurrence:
    """h_t = f(x_t, h_{t-1}; θ), t = 1..T: one layer's part of a forward pass, not run yet.

    Attributes:
        x: (T, B, I), or the rows of packed sequences, (N, I).
        first: h_0 and, for LSTM, c_0: (directions, B, H) each, (B, H) each where there is a ``cell``.
        weights: W_ih, W_hh and, if the layer has them, b_ih, b_hh, of one direction behind the other; of a cell that is
            not known all its parameters.
        mode: which of torch's own cells f is, "RNN_TANH", "RNN_RELU", "GRU" or "LSTM"; ``None`` if none of them.
        cell: the module that computes f; ``None`` for a layer of a recurrent module.
        directions: 1, or 2 for a layer that runs in both.
        packing: where the rows of packed sequences lie; ``None`` if they are not packed.
        states_only: whether to keep nothing but the states.
        memory: what is kept of the module's layers from pass to pass.
        names: of each direction in ``memory``.
        paths: what the chain of each direction is called.
    """

    x: Tensor
    first: Sequence[Tensor]
    weights: Sequence[Tensor]
    mode: str | None
    cell: nn.Module | None = None
    directions: int = 1
    packing: Packing | None = None
    states_only: bool = False
    memory: Memory = field(default_factory=Memory)
    names: Sequence[str] = ("0",)
    paths: Sequence[str] = ("",)

    @property
    def kind(self) -> str:
        """Which of torch's own cells f is, as :attr:`mode`; "separate units" of an elementwise one, or "any"."""
        if self.mode is not None:
            return self.mode
        return "separate units" if isinstance(self.cell, ElementwiseCell) else "any"

    @property
    def is_dense(self) -> bool:
        """Whether sequences are not packed, and states are vectors."""
        vectors = 3 if self.cell is None else 2
        return self.packing is None and all(part.dim() == vectors for part in self.first)


@dataclass(frozen=True)
class LayerCall:
    """A call of one layer of a recurrent module, in one direction or both, before it runs.

    Attributes:
        mode: as of :class:`Recurrence`.
        length: T.
        like: a state, (B, H), of the layer's device and precision.
        packed: whether sequences are packed, of several lengths.
        memory: as of :class:`Recurrence`, likewise all that follow but the last.
        names: of each direction.
        paths: of each direction.
        say: warns of what it is given, the first time.
    """

    mode: str
    length: int
    like: Tensor
    packed: bool
    memory: Memory
    names: Sequence[str]
    paths: Sequence[str]
    say: Callable[[str], None]


class SingleStepWarning:
    """Says, once, that a layer sees only calls of one step, of which no engine can make more.

    Args:
        path: of the layer.
    """

    def __init__(self, path: str):
        self.path, self.left = path, 16

    def count(self, length: int) -> None:
        """Take note of a call of so many steps."""
        if length > 1:
            self.left = 0
        elif self.left:
            self.left -= 1
            if not self.left:
                warnings.warn(
                    f"{self.path or 'the recurrent layer'} has been called with single steps only, of which an engine "
                    "cannot run any at once. Give it whole sequences; gradfree.run_with_resets(layer, input, state, "
                    "resets) takes those that begin anew in the middle.",
                    stacklevel=2,
                )


class Trajectory(NamedTuple):
    """What a recurrence has run through.

    Attributes:
        out: h behind each step, of the directions side by side; (T, B, ·), or packed as ``x`` is.
        finals: the final states, as :attr:`Recurrence.first`.
        kept: what the backward pass would compute anew otherwise: a GRU's gates, as in
            :class:`~gradfree.time.gru_forward.Gates`, or nothing; of a cell the other parts of the state behind each
            step, (T, B, ·) each.
        passes: what the engine's own forward pass leaves of each direction's run: :attr:`TimeChain.forward_pass`.
    """

    out: Tensor
    finals: Sequence[Tensor]
    kept: tuple[Tensor, ...] = ()
    passes: Sequence[object] = ()


class Forward(ABC):
    """A way to run a recurrence, without a graph. An engine names those of its own in :attr:`Engine.forwards`."""

    @abstractmethod
    def allows(self, recurrence: Recurrence) -> bool:
        """Return whether this way is possible and pays; changes nothing, and waits for no device."""

    @abstractmethod
    def run(self, recurrence: Recurrence) -> Trajectory:
        """Run it; changes none of its tensors."""


_KERNELS: dict[str | None, Any] = {
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
    "GRU": torch.gru,
    "LSTM": torch.lstm,
}


def run_kernel(recurrence: Recurrence) -> Sequence[Tensor]:
    """Run a layer of a recurrent module in torch's own kernel; return the outputs and the final states."""
    return _call(recurrence, None if recurrence.packing is None else recurrence.packing.batch_sizes)


def _call(recurrence: Recurrence, batch_sizes: Tensor | None = None) -> Sequence[Tensor]:
    x, weights, directions = recurrence.x, recurrence.weights, recurrence.directions
    assert recurrence.mode is not None
    hx = recurrence.first if len(recurrence.first) > 1 else recurrence.first[0]
    options = (len(weights) > 2 * directions, 1, 0.0, False, directions > 1)
    found: Sequence[Tensor]
    if batch_sizes is None:
        found = _KERNELS[recurrence.mode](x, hx, weights, *options, False)
    else:
        found = _KERNELS[recurrence.mode](x, batch_sizes, hx, weights, *options)
    return found


def run(engine: Solver, recurrence: Recurrence) -> Trajectory:
    """Run ``recurrence`` in the first of the engine's ways that allows it, or else step behind step."""
    way = next((way for way in engine.forwards if way.allows(recurrence)), None)
    return run_sequentially(recurrence) if way is None else way.run(recurrence)


def run_sequentially(recurrence: Recurrence) -> Trajectory:
    """Run ``recurrence`` step behind step: torch's outputs, or those of a cell's own loop, to the last bit."""
    x, first, weights = recurrence.x, recurrence.first, recurrence.weights
    if recurrence.cell is not None:
        steps = run_steps(recurrence.cell, x, first)
        out, *others = (torch.stack(part) for part in zip(*steps, strict=True))
        return Trajectory(out, steps[-1], tuple(others))
    if _keeps_gates(recurrence):
        out, gates = gru_with_gates(x, first[0][0], weights)
        return Trajectory(out, [out[-1:].clone()], gates)
    if recurrence.mode == "LSTM" and x.device.type == "cpu" and x.dtype is not torch.float64:
        # Where gradients are off, oneDNN's LSTM is another one, which rounds otherwise. No graph comes of it.
        given = [[part.detach() for part in parts] for parts in ([x], first, weights)]
        with torch.enable_grad():
            out, *finals = run_kernel(replace(recurrence, x=given[0][0], first=given[1], weights=given[2]))
    else:
        out, *finals = run_kernel(recurrence)
    return Trajectory(out, finals)


def _keeps_gates(recurrence: Recurrence) -> bool:
    """Return whether it is a GRU in one direction, and wide enough."""
    whole = recurrence.directions == 1 and recurrence.packing is None and not recurrence.states_only
    return recurrence.mode == "GRU" and whole and kept_gates_pay(recurrence.x, recurrence.weights[1].shape[1])


def run_each_direction(recurrence: Recurrence, run: Callable[[Recurrence], Trajectory]) -> Trajectory:
    """Return what ``run`` gives for each direction by itself, with sequences in the order in which it runs."""
    if recurrence.cell is not None:
        return run(recurrence)
    each = len(recurrence.weights) // recurrence.directions
    runs = [
        run(
            replace(
                recurrence,
                x=recurrence.x.flip(0) if d else recurrence.x,
                first=[part[d : d + 1] for part in recurrence.first],
                weights=recurrence.weights[d * each : (d + 1) * each],
                directions=1,
                states_only=recurrence.states_only or recurrence.directions > 1,
                names=recurrence.names[d : d + 1],
                paths=recurrence.paths[d : d + 1],
            )
        )
        for d in range(recurrence.directions)
    ]
    outs = [run.out.flip(0) if direction else run.out for direction, run in enumerate(runs)]
    finals = [torch.cat(part) for part in zip(*(run.finals for run in runs), strict=True)]
    passes = [taken for run in runs for taken in run.passes]
    kept = runs[0].kept if len(runs) == 1 else ()
    return Trajectory(torch.cat(outs, -1) if len(outs) > 1 else outs[0], finals, kept, passes)
