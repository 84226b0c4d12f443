"""Cuts sequences at resets into pieces, and gathers the pieces into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradfree.time.packing import Padding


@dataclass(frozen=True)
class Pieces:
    """The N pieces of a batch of sequences, each from one reset to the next.

    Attributes:
        sequence: index of the sequence that a piece is part of, (N,).
        start: its first step, (N,).
        length: its number of steps, (N,).
        reset: whether it starts with a reset, (N,).
        batch: B, the number of sequences.
    """

    sequence: Tensor
    start: Tensor
    length: Tensor
    reset: Tensor
    batch: int

    @staticmethod
    def from_resets(resets: Tensor) -> Pieces:
        """Return the pieces between ``resets`` (T, B), sequence by sequence, on the CPU; causes a device sync."""
        resets = resets.cpu()
        begins = resets.clone()
        begins[0] = True
        sequence, start = begins.t().nonzero(as_tuple=True)
        same = sequence[1:] == sequence[:-1]
        end = torch.cat([torch.where(same, start[1:], len(resets)), start.new_tensor([len(resets)])])
        return Pieces(sequence, start, end - start, resets[start, sequence], resets.shape[1])

    def batches(self) -> Iterator[PieceBatch]:
        """Yield the pieces in batches by length, the longest first; less than a third of each is padding."""
        order = self.length.argsort(descending=True, stable=True)
        while len(order):
            length = self.length[order]
            # Takes the longest n pieces while their mean length is over 2/3 of the longest; means fall with n.
            filled = 3 * length.cumsum(0) > 2 * length[0] * torch.arange(1, len(order) + 1, device="cpu")
            count = int(filled.sum())
            yield self.batch_of(order[:count])
            order = order[count:]

    def batch_of(self, chosen: Tensor) -> PieceBatch:
        """Return some pieces as the rows of one batch."""
        length = self.length[chosen]
        number = torch.arange(int(length.max()), device="cpu")[:, None]
        # After its end a row repeats its last step.
        step = self.start[chosen] + torch.minimum(number, length - 1)
        reset, sequence = self.reset[chosen], self.sequence[chosen]
        last = torch.cat([self.sequence[1:] != self.sequence[:-1], torch.ones(1, dtype=torch.bool, device="cpu")])
        return PieceBatch(step * self.batch + sequence, number < length, sequence, reset | (step[0] > 0), last[chosen])


@dataclass(frozen=True)
class PieceBatch:
    """N pieces as the rows of one padded batch (L, N, ·); all attributes are on the CPU.

    Attributes:
        index: each step's position in the flat (T · B) sequences, (L, N).
        valid: mask of the steps that are not padding, (L, N).
        sequence: see :class:`Pieces`.
        from_zero: whether a row starts from a zero state, not from its sequence's initial state, (N,).
        ends_sequence: whether a row ends at the end of its sequence, (N,).
    """

    index: Tensor
    valid: Tensor
    sequence: Tensor
    from_zero: Tensor
    ends_sequence: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows (L, N, ·) of ``x`` (T, B, ·)."""
        index = self.index.to(x.device)
        return x.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape)

    def initial_states(self, state: Tensor) -> Tensor:
        """Return the initial states of the rows from ``state``, those of the sequences (B, ...)."""
        given = state.index_select(0, self.sequence.to(state.device))
        return given.masked_fill(self.from_zero.to(state.device).view(-1, *[1] * (state.dim() - 1)), 0.0)

    def padding(self, device: torch.device) -> Padding:
        """Return the padding behind the rows."""
        return Padding(self.valid.unsqueeze(-1).to(device))


def in_sequence_order(outs: Sequence[Tensor], batches: Sequence[PieceBatch], shape: tuple[int, int]) -> Tensor:
    """Return the outputs of all batches, (L, N, ·) each or packed, in the order of the sequences, (T, B, ·)."""
    place = torch.empty(shape[0] * shape[1], dtype=torch.int64, device="cpu")
    done = 0
    for out, rows in zip(outs, batches, strict=True):
        packed = out.dim() == 2
        count = len(out) if packed else rows.valid.numel()
        number = torch.arange(count, device="cpu")
        place[rows.index[rows.valid]] = done + (number if packed else number.view_as(rows.valid)[rows.valid])
        done += count
    flat = torch.cat([out if out.dim() == 2 else out.flatten(0, 1) for out in outs])
    return flat.index_select(0, place.to(flat.device)).unflatten(0, shape)


def final_states(states: Sequence[Tensor], batches: Sequence[PieceBatch]) -> Tensor:
    """Return the final states of the sequences (B, ...) from those of the rows of all batches."""
    last = torch.cat([rows.ends_sequence for rows in batches])
    order = torch.cat([rows.sequence for rows in batches])[last].argsort()
    whole = torch.cat(list(states))
    return whole.index_select(0, last.nonzero()[:, 0][order].to(whole.device))
