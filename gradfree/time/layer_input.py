"""The input of torch's recurrent modules in one layout: steps first, or the rows of packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradfree.devices.hardware import runs_cudnn
from gradfree.time.runs import Run, runs_of
from gradfree.torchside.private import is_simulated


@dataclass(frozen=True)
class LayerInput:
    """The input of a recurrent module.

    Attributes:
        module: the module.
        given: the input as the module takes it.
    """

    module: nn.RNNBase
    given: Any

    @cached_property
    def packed(self) -> bool:
        """Whether the input is packed."""
        return isinstance(self.given, PackedSequence)

    @cached_property
    def x(self) -> Tensor:
        """The input as (T, B, I), or as rows (N, I) if it is :attr:`ragged`."""
        if self.ragged:
            return self.given.data
        if self.packed:
            return self.given.data.unflatten(0, (self.length, self.batch))
        x: Tensor = self.given if self._batched else self.given.unsqueeze(0 if self.module.batch_first else 1)
        # Same layout as in the module itself, as the rounding of matrix products depends on it.
        return x.transpose(0, 1) if self.module.batch_first else x

    @cached_property
    def like(self) -> Tensor:
        """A state of one layer and direction, (B, H), not initialised."""
        return self.x.new_empty(self.batch, self.module.hidden_size)

    @property
    def batch_sizes(self) -> Tensor | None:
        """The number of sequences of each step if the input is packed."""
        return self.given.batch_sizes if self.packed else None

    @cached_property
    def length(self) -> int:
        """T."""
        return length_of(self.module, self.given)

    @cached_property
    def batch(self) -> int:
        """B."""
        return self.runs[0].rows if self.packed else self.x.shape[1]

    @cached_property
    def ragged(self) -> bool:
        """Whether the input is packed and has several lengths; otherwise it has the layout of an ordinary batch."""
        return self.packed and len(self.runs) > 1

    @cached_property
    def runs(self) -> Sequence[Run]:
        """The runs of packed sequences."""
        return runs_of(self.given.batch_sizes)

    def initial_states(self, hx: Any) -> list[Tensor]:
        """Return the checked initial states, (layers · directions, B, H) each, in the order of :attr:`x`."""
        module = self.module
        count = module.num_layers * (2 if module.bidirectional else 1)
        parts = 2 if module.mode == "LSTM" else 1
        x = self.given.data if self.packed else self.x
        if hx is None:
            states = [x.new_zeros(count, self.batch, module.hidden_size)] * parts
        else:
            states = list(hx) if parts == 2 else [hx]
            states = states if self._batched else [state.unsqueeze(1) for state in states]
            order = self.given.sorted_indices if self.packed else None
            states = states if order is None else [state.index_select(1, order) for state in states]
        as_given = x.transpose(0, 1) if module.batch_first and not self.packed else x
        checked: Any = tuple(states) if parts == 2 else states[0]
        module.check_forward_args(as_given, checked, self.batch_sizes)
        return states

    def result(self, out: Tensor, finals: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return what the module returns, from outputs as :attr:`x` and the final states as the initial ones."""
        whole: Any
        if self.packed:
            _, sizes, order, back = self.given
            finals = [final if back is None else final.index_select(1, back) for final in finals]
            whole = PackedSequence(out if self.ragged else out.flatten(0, 1), sizes, order, back)
        else:
            whole = out.transpose(0, 1) if self.module.batch_first else out
            if not self._batched:
                whole = whole.squeeze(0 if self.module.batch_first else 1)
                finals = [final.squeeze(1) for final in finals]
        return whole, tuple(finals) if len(finals) > 1 else finals[0]

    @cached_property
    def _batched(self) -> bool:
        return self.packed or self.given.dim() == 3


def length_of(module: nn.RNNBase, given: Any) -> int:
    """Return T of an input that is packed or has two or three dimensions."""
    if isinstance(given, PackedSequence):
        return len(given.batch_sizes)
    return int(given.shape[int(module.batch_first and given.dim() == 3)])


CallKey = tuple[Any, ...]


def key_of(module: nn.RNNBase, given: Any) -> CallKey | None:
    """Return the sizes and settings by which an engine decides whether it leaves sequences of one length to torch.

    Asking it again, with the same answer, takes a large part of a short layer's time. ``None``: it must be asked, as
    the input is not well formed, or its sizes are no numbers.
    """
    x = tensor_of(given)
    if not isinstance(x, Tensor) or x.dim() not in (2, 3) or is_simulated(x):
        return None
    kind = x.device.type
    # If as many rows in as many steps end with the same number of rows, no step has another one.
    last = int(given.batch_sizes[-1]) if isinstance(given, PackedSequence) else None
    sizes = last, length_of(module, given), x.shape
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return *sizes, x.dtype, x.device, runs_cudnn(x.device), autocast, torch.is_grad_enabled()


def tensor_of(given: Any) -> Any:
    """Return the rows of packed sequences, or what is not packed as it is."""
    return given.data if isinstance(given, PackedSequence) else given


def well_formed(x: Any, hx: Any) -> bool:
    """Return whether ``x`` is packed, or has two or three dimensions (one sequence, or a batch) and ``hx`` as many.

    Packed sequences must be sorted, so that the batch never grows, and ``x`` floating-point.
    """
    if not tensor_of(x).is_floating_point():
        return False
    if isinstance(x, PackedSequence):
        return bool((x.batch_sizes[1:] <= x.batch_sizes[:-1]).all())
    states = () if hx is None else hx if isinstance(hx, tuple | list) else (hx,)
    return x.dim() in (2, 3) and all(state.dim() == x.dim() for state in states)


def is_batch_major(x: Tensor) -> bool:
    """Return whether ``x`` (T, B, ...) stores sequence after sequence in memory."""
    return x.shape[1] > 1 and x.stride(0) < x.stride(1)
