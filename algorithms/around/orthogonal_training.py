"""Engines that keep weights orthogonal while another engine computes the gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from gradfree.algorithms.backprop import Backprop
from gradfree.engines.engine import Engine
from gradfree.orthogonal.orthogonal_engine import OrthogonalEngine


@dataclass(frozen=True, kw_only=True)
class Orthogonal(OrthogonalEngine):
    """Keeps weights orthogonal under ``engine``: ``Orthogonal(create_engine("dfa"), temperature=16)``.

    ``foton`` and ``orthogonal_backprop`` are such combinations, registered as engines.

    Args:
        engine: computes the gradients; any engine for chains in depth or for single layers.

    The other options are those of :class:`~gradfree.orthogonal.orthogonal_engine.OrthogonalEngine`.
    """

    engine: Engine = field(kw_only=False)

    @property
    def rule(self) -> Engine:
        """Return ``engine``."""
        return self.engine


@dataclass(frozen=True, kw_only=True)
class OrthogonalBackprop(OrthogonalEngine):
    """Exact backpropagation on the chains of ``foton``, with weights kept orthogonal in the same way.

    This baseline separates FOTON's gradients (arXiv 2512.20668) from its constraint on the weights. Its distance to
    ``backprop`` is the cost of the constraint; the distance of ``foton`` to it is the cost of inexact gradients.

    Its options are those of :class:`~gradfree.orthogonal.orthogonal_engine.OrthogonalEngine`. As in ``foton``, the
    error does not contain the factor ``temperature``.
    """

    @cached_property
    def rule(self) -> Engine:
        """Exact backpropagation."""
        return Backprop()
