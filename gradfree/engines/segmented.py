"""A chain cut into segments: exact inside of each, and what the split carries across their borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradfree.algebra.cotangents import Cotangent, plus, times
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.errors import ChainError
from gradfree.wording import count as counted


class Segments:
    """The links of a chain in C segments, solved side by side: K is F itself inside, and carries across borders.

    What is iterated are the cotangents at the segments' ends. A sweep pulls them through all segments at once, link by
    link, the same number of pulls as a sweep over single links; what leaves a segment, and what the residual path makes
    of the change at its end, is the next one's. Exact after C - 1 sweeps. Multiple shooting (Bock & Plitt 1984) with a
    residual path for a corrector, as parareal has it (Lions, Maday & Turinici 2001).

    Args:
        chain: the links.
        direct: the direct cotangents of its states.
        factors: K of each link, which borders carry.
        count: C; where it does not divide the number of links, the first segments are longer by one.

    Raises:
        ChainError: more segments than links.
    """

    def __init__(self, chain: Chain, direct: Any, factors: Any, count: int):
        length = len(chain)
        if count > length:
            raise ChainError(
                f"segments={count}, but the loss has reached {counted(length, 'link')} of the chain {chain.path!r}: a "
                f"segment is one link at least. Use fewer. If the model goes through more blocks, the chain is in "
                f"pieces: handle.chains[{chain.path!r}].splits tells why."
            )
        sizes = [length // count + (c < length % count) for c in range(count)]
        self.ends = [sum(sizes[: c + 1]) - 1 for c in range(count)]
        self.sizes = sizes
        self.chain, self.direct, self.factors = chain, direct, factors

    def __len__(self) -> int:
        """C, the number of segments."""
        return len(self.ends)

    def first(self) -> list[Cotangent]:
        """Return the cotangents at the ends that K alone carries there."""
        delta = self.chain.scan(self.direct, self.factors)
        return [delta[end] for end in self.ends]

    def sweep(self, borders: Sequence[Cotangent]) -> list[Cotangent]:
        """Return the cotangents at the ends after one sweep."""
        delta = self._inside(borders)
        starts = [end - size + 1 for end, size in zip(self.ends, self.sizes, strict=True)]
        leaving = self.chain.vjps(starts[1:], [delta[start] for start in starts[1:]])
        new: list[Cotangent] = [*borders[:-1], self.direct[self.ends[-1]]]
        for c in range(len(self) - 1, 0, -1):
            before, after = borders[c], new[c]
            change = plus(after, None if before is None else -before)
            for i in range(self.ends[c], starts[c] - 1, -1):
                change = times(change, self.factors[i])
            new[c - 1] = plus(plus(self.direct[self.ends[c - 1]], leaving[c - 1]), change)
        return new

    def gradients(self, borders: Sequence[Cotangent]) -> ChainGradients:
        """Return the gradients for the cotangents at the ends."""
        return self.chain.gradients(self._inside(borders))

    def _inside(self, borders: Sequence[Cotangent]) -> list[Cotangent]:
        """Return the cotangents of all states, exact for those at the ends."""
        delta: list[Cotangent] = list(self.direct)
        for end, border in zip(self.ends, borders, strict=True):
            delta[end] = border
        for step in range(max(self.sizes) - 1):
            at = [end - step for end, size in zip(self.ends, self.sizes, strict=True) if size > step + 1]
            for i, carried in zip(at, self.chain.vjps(at, [delta[i] for i in at]), strict=True):
                delta[i - 1] = plus(self.direct[i - 1], carried)
        return delta
