"""Any engine of layers, with weights that are kept orthogonal."""

from __future__ import annotations

from dataclasses import dataclass, field

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
