"""Any engine of layers, and backpropagation, with weights that are kept orthogonal."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from gradfree.algorithms.backprop import Backprop
from gradfree.engines.engine import Engine
from gradfree.orthogonal.orthogonal_engine import OrthogonalEngine


@dataclass(frozen=True, kw_only=True)
class Orthogonal(OrthogonalEngine):
    """Keeps weights orthogonal under ``engine``: ``Orthogonal(create_engine("dfa"), temperature=16)``.

    ``foton`` and ``orthogonal_backprop`` are two such pairs with names of their own.

    Args:
        engine: gives the gradients; any that takes chains in depth, or of layers.

    The other options are those of :class:`~gradfree.orthogonal.orthogonal_engine.OrthogonalEngine`.
    """

    engine: Engine = field(kw_only=False)

    @property
    def rule(self) -> Engine:
        """Return ``engine``."""
        return self.engine


@dataclass(frozen=True, kw_only=True)
class OrthogonalBackprop(OrthogonalEngine):
    """Exact backpropagation on the chains of ``foton``, whose weights are kept orthogonal the same way.

    The baseline that tells FOTON's gradients (arXiv 2512.20668) from its constraint on the weights: what it reaches
    short of ``backprop``, the constraint costs; what ``foton`` reaches short of it, the missing backward pass.

    Its options are those of :class:`~gradfree.orthogonal.orthogonal_engine.OrthogonalEngine`; as in ``foton``, the
    error is taken without the factor ``temperature``.
    """

    @cached_property
    def rule(self) -> Engine:
        """Exact backpropagation."""
        return Backprop()
