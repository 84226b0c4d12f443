"""Sequences that begin anew in the middle: where the pieces between resets lie in batches of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """Stretches of a batch of sequences, one a row.

    Attributes:
        sequence: which sequence each is of, (N,).
        start: its first step, (N,).
        length: how many steps it has, (N,).
        fresh: whether its state is zero before the first step, (N,).
        batch: B, the number of sequences.
    """

    sequence: Tensor
    start: Tensor
    length: Tensor
    fresh: Tensor
    batch: int

    @staticmethod
    def from_resets(resets: Tensor) -> Pieces:
        """Return the pieces between ``resets`` (T, B), sequence by sequence, on the CPU; waits for the device."""
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
            # The means of the longest n fall with n.
            filled = 3 * length.cumsum(0) > 2 * length[0] * torch.arange(1, len(order) + 1, device="cpu")
            count = int(filled.sum())
            yield self.batch_of(order[:count])
            order = order[count:]

    def batch_of(self, chosen: Tensor) -> PieceBatch:
        """Return some pieces as the rows of one batch."""
        length = self.length[chosen]
        number = torch.arange(int(length.max()), device="cpu")[:, None]
        # Behind its end a row has its last step again.
        step = self.start[chosen] + torch.minimum(number, length - 1)
        fresh, sequence = self.fresh[chosen], self.sequence[chosen]
        last = torch.cat([self.sequence[1:] != self.sequence[:-1], torch.ones(1, dtype=torch.bool, device="cpu")])
        return PieceBatch(step * self.batch + sequence, number < length, sequence, fresh | (step[0] > 0), last[chosen])


@dataclass(frozen=True)
class PieceBatch:
    """Pieces side by side, on the CPU.

    Attributes:
        index: where each step is among those of all sequences, (L, N), for a flat (T · B).
        valid: which steps are no padding, likewise.
        sequence: as of :class:`Pieces`.
        from_zero: whether a row begins with a zero state and not with its sequence's initial one, (N,).
        ends_sequence: whether it ends where its sequence does, (N,).
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
        """Return the initial states of the rows, of those of the sequences (B, ...)."""
        given = state.index_select(0, self.sequence.to(state.device))
        return given.masked_fill(self.from_zero.to(state.device).view(-1, *[1] * (state.dim() - 1)), 0.0)

    def last_steps(self, out: Tensor) -> Tensor:
        """Return what ``out`` (L, N, ·) is behind the last step of each row, (N, ·)."""
        ends = (self.valid.sum(0) - 1).to(out.device)
        return out[ends, torch.arange(out.shape[1], device=out.device)]


def in_sequence_order(outs: Sequence[Tensor], batches: Sequence[PieceBatch], shape: tuple[int, int]) -> Tensor:
    """Return (T, B, ·) of what all batches have given, (L, N, ·) each, or packed."""
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
    """Return the states behind all sequences (B, ...), of those behind the rows of all batches."""
    last = torch.cat([rows.ends_sequence for rows in batches])
    order = torch.cat([rows.sequence for rows in batches])[last].argsort()
    whole = torch.cat(list(states))
    return whole.index_select(0, last.nonzero()[:, 0][order].to(whole.device))
