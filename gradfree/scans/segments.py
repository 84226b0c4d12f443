"""A step function in segments: a dimension of ``torch.func.vmap``, so that a step sees the shapes that a loop has."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradfree.convergence.outcome import Outcome, StoppingRule, largest, largest_of_rows
from gradfree.loops.compiled import Compiler, run_chunk_of_segments
from gradfree.loops.recurrence import LeafStep, Loop, Structure, leaf_step
from gradfree.scans.first_step import FirstStep, Replacing
from gradfree.scans.layout import Cut
from gradfree.segments.multiple_shooting import SweepResult, solve_borders
from gradfree.torchside.hooks import without_hooks
from gradfree.torchside.private import as_written

_MASK = 1e4
"""Numbers of an initial carry from this on rule a part of a state out, as -inf, -1e9 (in place of log 0) and NaN do."""


@dataclass
class Ran:
    """One run of all segments.

    Attributes:
        starts: the borders that it began from, (C, ...) each.
        leaving: the carries at the ends of all segments, (C, ...) each.
        inner: the carries before the last step of the last segment, or of all, as far as they are known.
        pieces: for each leaf of y its pieces, see :class:`~gradfree.scans.layout.Cut`.
        x: the inputs, (S, C, ...) each.
        others: tensors in place of those from outside that are no leaves.
    """

    starts: list[Tensor]
    leaving: list[Tensor]
    inner: list[Tensor]
    pieces: list[list[Tensor]]
    x: list[Tensor] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)

    def free(self) -> None:
        """Drop all tensors, and with them the graph."""
        for tensors in (self.starts, self.leaving, self.inner, self.pieces, self.x, self.others):
            tensors.clear()


class LoopSegments:
    """A loop, cut into segments.

    Args:
        loop: the loop.
        first: its first step.
        cut: how to cut it.
        burn: the number of burn-in steps; may be more than S.
        compiler: compiles chunks of steps; ``None``: they are not compiled.
    """

    def __init__(self, loop: Loop, first: FirstStep, cut: Cut, burn: int, compiler: Compiler | None):
        self.loop, self.first, self.cut, self.burn = loop, first, cut, burn
        # What is put in place of other tensors and functions would have to be compiled, too.
        self._compiler = None if first.inner or first.has_fused_cells else compiler
        self.carry, carry = Structure.of(loop.init)
        self.x_at = [n for n, t in enumerate(loop.xs) if t is not None]
        self.y, made = Structure.of(first.y)
        self.init = [t.detach() for t in carry]
        self.dtypes = [t.dtype for t in self.init]
        _, after = Structure.of(first.carry)
        # The part of the carry that a leaf of y is, as in ``return h, h``.
        self.part_of = [next((n for n, c in enumerate(after) if c is t), None) for t in made]
        # As in the loop, parts of the carry that no gradient reaches have no graph.
        self.needed = [a.requires_grad or b.requires_grad for a, b in zip(carry, after, strict=True)]
        self.x = [cut.split(loop.xs[n].detach()) for n in self.x_at]
        self.ran: Ran | None = None

    def solve(self, stopping: StoppingRule) -> tuple[Ran, Outcome]:
        """Run all segments until their borders agree."""
        return solve_borders(self.run, self.guess(), stopping, masks=True)

    def guess(self) -> list[Tensor]:
        """Return the first guess of all borders: a burn-in through the steps before each border.

        It begins with the loop's initial carry, since not all steps are defined at zero (``h / h.norm()``).
        """
        count, steps = self.cut.count - 1, self.cut.steps
        full, part = divmod(self.burn, steps)
        with torch.no_grad():
            found = [_without_masks(t).expand(count, *t.shape).clone() for t in self.init]
            if part:
                found, _, _ = self._run(found, [t[steps - part :, :count] for t in self.x], [], {})
            for _ in range(full):
                starts = self._borders([t[:-1] for t in found])
                found, _, _ = self._run(starts, [t[:, :count] for t in self.x], [], {})
        if self.burn and torch.is_autocast_enabled(self.init[0].device.type):
            # It may have kept casts of weights without a graph.
            torch.clear_autocast_cache()
        return list(map(numbers, self._borders(found)))

    def _borders(self, inner: Sequence[Tensor]) -> list[Tensor]:
        """Return the carries at the starts of segments: the initial one, and the ``inner`` ones."""
        return [torch.cat([a[None], b]) for a, b in zip(self.init, inner, strict=True)]

    def run(self, entering: Sequence[Tensor]) -> SweepResult:
        """Run all segments from their borders, with a graph where gradients are enabled."""
        if self.ran is not None:
            self.ran.free()
        starts = [values(b, dtype).detach() for b, dtype in zip(entering, self.dtypes, strict=True)]
        x, others = list(self.x), {}
        if torch.is_grad_enabled():
            starts = [_leaf(b, needed) for b, needed in zip(starts, self.needed, strict=True)]
            x = [_leaf(t, self.loop.xs[n].requires_grad) for t, n in zip(x, self.x_at, strict=True)]
            others = {id(t): _leaf(t, True) for t in self.first.inner}
        self.ran = ran = self._run_all(starts, x, others)
        if any(t.requires_grad and not needed for t, needed in zip(ran.leaving, self.needed, strict=True)):
            # Such a part gets its graph from another part, at a later step than the first.
            self.needed = [t.requires_grad or needed for t, needed in zip(ran.leaving, self.needed, strict=True)]
            return self.run(entering)
        ran.x, ran.others = x, list(others.values())
        leaving = [numbers(t.detach()) for t in ran.leaving]
        return SweepResult(ran, leaving, [_size(t, dtype) for t, dtype in zip(leaving, self.dtypes, strict=True)])

    def _run_all(self, starts: list[Tensor], x: list[Tensor], others: dict[int, Tensor]) -> Ran:
        cut, last = self.cut, self.cut.last
        ends = sorted({self.burn % cut.steps, last, cut.steps} - {0})
        carry, inner, pieces = self._run(starts, [t[:last] for t in x], [e for e in ends if e <= last], others)
        if last == cut.steps:
            return Ran(starts, carry, inner, pieces)
        rest = [t[last:, :-1] for t in x]
        after, _, more = self._run([t[:-1] for t in carry], rest, [e - last for e in ends if e > last], others)
        leaving = [torch.cat([a, b[-1:]]) for a, b in zip(after, carry, strict=True)]
        return Ran(starts, leaving, inner, [a + b for a, b in zip(pieces, more, strict=True)])

    def _run(
        self, starts: list[Tensor], x: list[Tensor], ends: list[int], others: dict[int, Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
        """Run some steps of some segments.

        Args:
            starts: the carries before them, (C, ...) each.
            x: their inputs, (n, C, ...) each.
            ends: the numbers of steps after which a piece of the outputs ends; empty: outputs are not wanted.
            others: tensors in place of those from outside, by id.

        Returns:
            The carries after the last step, those before it, and the pieces of each leaf of y.
        """
        step = leaf_step(self.loop, self.carry, self.y)
        if self._compiler is not None:
            return self._run_compiled(self._compiler, step, starts, x, ends)
        steps = len(x[0])

        def run(carry: list[Tensor], x: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
            before, ys = carry, []
            for each in zip(*(t.unbind() for t in x), strict=True):
                before = carry
                # No function takes what the step returns as it is.
                carry, y = ([others.get(id(t), t) for t in part] for part in step(carry, each))
                ys.append(y)
            return carry, before if steps > 1 else [], ys if ends else []

        with as_written(), Replacing(others) if others or self.first.has_fused_cells else nullcontext():
            found: Any = torch.func.vmap(run, in_dims=(0, 1))(starts, x)
        carry, before, ys = found
        cuts = list(zip([0, *ends], ends, strict=False))
        pieces = [[torch.stack(of_leaf[a:b]) for a, b in cuts] for of_leaf in zip(*ys, strict=True)]
        return carry, before, pieces

    def _run_compiled(
        self, compiler: Compiler, step: LeafStep, carry: Sequence[Tensor], x: Sequence[Tensor], ends: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
        """Do what :meth:`_run` does, in compiled chunks."""
        stops = list(ends) or [len(x[0])]
        by_piece, before = [], carry
        for begin, end in zip([0, *stops], stops, strict=False):
            part = [t[begin:end] for t in x]
            carry, ys, before = compiler.run(self.loop, run_chunk_of_segments, step, carry, part)
            by_piece.append(ys)
        pieces = [list(of_leaf) for of_leaf in zip(*by_piece, strict=True)] if ends else []
        return list(carry), list(before), pieces

    def differences(self, ran: Ran) -> str | None:
        """Return in what the results of a run differ from those of the loop, "dtypes" or "shapes".

        ``torch.func.vmap`` gives numbers, tensors without dimensions, a dimension, with which they count for dtypes.
        """
        _, made = Structure.of((self.first.carry, self.first.y))
        found = [*(t[0] for t in ran.leaving), *(pieces[0][0, 0] for pieces in ran.pieces)]
        if [t.dtype for t in found] != [t.dtype for t in made]:
            return "dtypes"
        return "shapes" if [t.shape for t in found] != [t.shape for t in made] else None

    def outputs(self, ran: Ran) -> list[Tensor]:
        """Return the leaves of the final carry and of the outputs of all steps, (T, ...)."""
        return [*(t[-1].clone() for t in ran.leaving), *(self.cut.join(pieces) for pieces in ran.pieces)]

    def backward(self, ran: Ran, cotangents: Sequence[Tensor | None]) -> LoopSegmentsBackward:
        """Return the backward pass through one run, for the cotangents of its :meth:`outputs`."""
        return LoopSegmentsBackward(self, ran, cotangents)

    def tree(self, outputs: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return the final carry and the outputs in the structures that the step returns."""
        n = len(self.init)
        return self.carry.build(outputs[:n]), self.y.build(outputs[n:])


class LoopSegmentsBackward:
    """The backward pass through one run of all segments.

    Args:
        segments: the loop in segments.
        ran: the run.
        cotangents: of the final carry and of the outputs, as :meth:`LoopSegments.outputs` returns them; ``None``: zero.
    """

    def __init__(self, segments: LoopSegments, ran: Ran, cotangents: Sequence[Tensor | None]):
        self.segments, self.ran, self.cut = segments, ran, segments.cut
        self.final = cotangents[: len(ran.leaving)]
        self.e = [None if e is None else self.cut.split(e, e.new_zeros(())) for e in cotangents[len(ran.leaving) :]]
        self.live = [n for n, t in enumerate(ran.starts) if t.requires_grad and ran.leaving[n].requires_grad]
        self.starts = [t for t in ran.starts if t.requires_grad]
        self.x = [t for t in ran.x if t.requires_grad]

    def solve(self, stopping: StoppingRule) -> tuple[Any, Outcome]:
        """Run the VJPs of all segments until the cotangents at their borders agree."""
        if not self.live:
            return self.run([]).result, Outcome(0.0, settled=True, mismatches=[0.0])
        return self._solve(stopping)

    def _solve(self, stopping: StoppingRule) -> tuple[Any, Outcome]:
        return solve_borders(self.run, self.guess(), stopping, reverse=True)

    def solve_in_order(self) -> Any:
        """Return what :meth:`solve` does, by as many sweeps as there are borders: exact for infinite numbers, too."""
        entering = self._swept(self._entering([None] * len(self.live)), self.cut.count - 1)
        return self.run(list(map(numbers, entering))).result

    def guess(self) -> list[Tensor]:
        """Return the first guess of entering cotangents: a burn-in from zero through the steps after each border."""
        full, part = divmod(self.segments.burn, self.cut.steps)
        found = self._entering([None] * len(self.live))
        if part:
            found = self._entering(self._to_starts(*self._of_outputs(part)))
        return list(map(numbers, self._swept(found, full)))

    def _swept(self, entering: list[Tensor], sweeps: int) -> list[Tensor]:
        """Return the entering cotangents after sweeps through whole segments."""
        for _ in range(sweeps):
            entering = self._entering(self._to_starts(*self._roots(entering)))
        return entering

    def _to_starts(self, roots: list[Tensor], given: list[Tensor]) -> Sequence[Tensor | None]:
        """Return the cotangents at the starts; autograd only visits what leads there."""
        if not roots:
            return [None] * len(self.live)
        starts = [self.ran.starts[n] for n in self.live]
        return torch.autograd.grad(roots, starts, given, retain_graph=True, allow_unused=True)

    def _entering(self, leaving: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the cotangents that enter the segments, from those that leave them; exact for the last segment."""
        found = []
        for n, v in zip(self.live, leaving, strict=True):
            entering = torch.zeros_like(self.ran.leaving[n])
            if v is not None:
                entering[:-1] = v[1:]
            if (e := self.final[n]) is not None:
                entering[-1] = e
            found.append(entering)
        return found

    def _roots(self, entering: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return all outputs and the ends of all segments, with their cotangents."""
        roots, given = self._of_outputs(self.cut.steps)
        return [*roots, *(self.ran.leaving[n] for n in self.live)], [*given, *entering]

    def run(self, entering: Sequence[Tensor]) -> SweepResult:
        """Run the VJPs of all segments from the entering cotangents."""
        dtypes = [self.ran.leaving[n].dtype for n in self.live]
        roots, given = self._roots([values(v, dtype) for v, dtype in zip(entering, dtypes, strict=True)])
        inner = [self.ran.inner[n] for n in self.live] if self.ran.inner else []
        inner = [t for t in inner if t.requires_grad]
        leaves, others = self.segments.first.leaves, self.ran.others
        targets = [*self.starts, *self.x, *leaves, *others, *inner]
        with without_hooks(leaves):
            found = torch.autograd.grad(roots, targets, given, retain_graph=True, allow_unused=True)
        of_starts = dict(zip(map(id, self.starts), found, strict=False))
        leaving = []
        for n in self.live:
            start = self.ran.starts[n]
            v = of_starts[id(start)]
            leaving.append(numbers(torch.zeros_like(start) if v is None else v))
        seen = [v for v in found[len(targets) - len(inner) :] if v is not None]
        sizes = [self._size(n, v, seen) for n, v in zip(self.live, leaving, strict=True)]
        return SweepResult(found[: len(targets) - len(inner)], leaving, sizes)

    def _of_outputs(self, steps: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the pieces of outputs of the first ``steps`` of each segment, with their cotangents."""
        roots, given = [], []
        for e, pieces in zip(self.e, self.ran.pieces, strict=True):
            begin = 0
            for piece in pieces:
                end = begin + len(piece)
                if e is not None and piece.requires_grad and end <= steps:
                    roots.append(piece)
                    given.append(e[begin:end, : piece.shape[1]])
                begin = end
        return roots, given

    def _size(self, n: int, leaving: Tensor, inner: Sequence[Tensor]) -> Tensor:
        """Return the largest cotangent of a part of the carry in each segment, as far as it is known, (C,)."""
        like = self.ran.starts[n]
        known = [leaving, *(numbers(v) for v in inner if v.shape[1:] == like.shape[1:])]
        # Of other outputs it is not known how much of their cotangents reaches the carry.
        parts = zip(self.e, self.segments.part_of, strict=True)
        known += [numbers(e).transpose(0, 1) for e, part in parts if e is not None and part == n]
        sizes = torch.stack([largest_of_rows(v).to(leaving.dtype) for v in known]).amax(0)
        if (e := self.final[n]) is not None:
            sizes[-1] = torch.maximum(sizes[-1], largest(numbers(e)))
        return sizes

    def gradients(self, found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the initial carry, the inputs, the leaves and the other tensors from outside."""
        given = iter(found)
        of_init = [next(given) if t.requires_grad else None for t in self.ran.starts]
        of_x = [next(given) if t.requires_grad else None for t in self.ran.x]
        return [
            *(None if v is None else v[0] for v in of_init),
            *(None if v is None else self.cut.undo_split(v) for v in of_x),
            *given,
        ]


def numbers(t: Tensor) -> Tensor:
    """Return a tensor whose elements can be subtracted and compared by size, from any dtype."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.to(torch.uint8) if t.dtype is torch.bool else t


def values(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo :func:`numbers`."""
    return torch.view_as_complex(t) if dtype.is_complex else t.to(dtype)


def _size(t: Tensor, dtype: torch.dtype) -> Tensor:
    # Integers must agree exactly, so each of their differences counts as large.
    exact = not (dtype.is_floating_point or dtype.is_complex)
    return torch.full((len(t),), 1e-6, dtype=torch.float32, device=t.device) if exact else largest_of_rows(t)


def _without_masks(t: Tensor) -> Tensor:
    """Return a carry in which no part of a state is ruled out, as by log 0: the steps may never have reached it."""
    return t.masked_fill(~(t.abs() < _MASK), 0) if t.is_floating_point() else t


def _leaf(t: Tensor, needed: bool) -> Tensor:
    return t.detach().requires_grad_(needed and (t.is_floating_point() or t.is_complex()))
