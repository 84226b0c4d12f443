"""A chain cut into segments: exact gradients inside each segment, K across the borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradfree.algebra.cotangents import Cotangent, plus, times_all
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.errors import ChainError
from gradfree.wording import count as counted


class Segments:
    """The links of a chain in C segments, solved side by side: K is F inside a segment and ``factors`` across borders.

    The unknowns are the cotangents at the segments' ends. A sweep runs them through all segments at once, link by link:
    as many VJPs as a sweep over single links. The cotangent that leaves a segment belongs to the end of the segment
    before it. K corrects it for the change at the segment's own end. Exact after C - 1 sweeps. This is multiple
    shooting (Bock & Plitt 1984); the corrector is that of parareal (Lions, Maday & Turinici 2001) with K.

    Args:
        chain: the links.
        direct: the direct cotangents of its states.
        factors: K of each link, for the corrector.
        count: C; if it does not divide the number of links, the first segments have one link more.

    Raises:
        ChainError: more segments than links.
    """

    def __init__(self, chain: Chain, direct: Any, factors: Any, count: int):
        length = len(chain)
        if count > length:
            raise ChainError(
                f"segments={count}, but the loss has reached {counted(length, 'link')} of the chain {chain.path!r}: "
                f"each segment needs at least one. Use fewer segments. If the model runs more blocks, the chain is in "
                f"pieces: handle.chains[{chain.path!r}].splits says why."
            )
        sizes = [length // count + (c < length % count) for c in range(count)]
        self.ends = [sum(sizes[: c + 1]) - 1 for c in range(count)]
        self.sizes = sizes
        self.chain, self.direct, self.factors = chain, direct, factors

    def __len__(self) -> int:
        """C, the number of segments."""
        return len(self.ends)

    def first(self) -> list[Cotangent]:
        """Return the cotangents at the segments' ends with K in place of F for all links."""
        delta = self.chain.scan(self.direct, self.factors)
        return [delta[end] for end in self.ends]

    def sweep(self, borders: Sequence[Cotangent]) -> list[Cotangent]:
        """Return the cotangents at the segments' ends after one sweep."""
        delta = self._inside(borders)
        starts = [end - size + 1 for end, size in zip(self.ends, self.sizes, strict=True)]
        leaving = self.chain.vjps(starts[1:], [delta[start] for start in starts[1:]])
        new: list[Cotangent] = [*borders[:-1], self.direct[self.ends[-1]]]
        for c in range(len(self) - 1, 0, -1):
            before, after = borders[c], new[c]
            change = plus(after, None if before is None else -before)
            change = times_all(change, self.factors[starts[c] : self.ends[c] + 1])
            new[c - 1] = plus(plus(self.direct[self.ends[c - 1]], leaving[c - 1]), change)
        return new

    def gradients(self, borders: Sequence[Cotangent]) -> ChainGradients:
        """Return the gradients for the cotangents ``borders`` at the segments' ends."""
        return self.chain.gradients(self._inside(borders))

    def _inside(self, borders: Sequence[Cotangent]) -> list[Cotangent]:
        """Return the cotangents of all states, exact given those at the segments' ends."""
        delta: list[Cotangent] = list(self.direct)
        for end, border in zip(self.ends, borders, strict=True):
            delta[end] = border
        for step in range(max(self.sizes) - 1):
            at = [end - step for end, size in zip(self.ends, self.sizes, strict=True) if size > step + 1]
            for i, carried in zip(at, self.chain.vjps(at, [delta[i] for i in at]), strict=True):
                delta[i - 1] = plus(self.direct[i - 1], carried)
        return delta
