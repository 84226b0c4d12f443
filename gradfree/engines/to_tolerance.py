"""Engines that solve chains in time to a tolerance, in the forward and the backward pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradfree.chains.report import path_name
from gradfree.chains.site import Site
from gradfree.convergence.outcome import coarsest_dtype, finest_tolerance, tolerance_for
from gradfree.convergence.passes import Pass
from gradfree.engines.engine import Engine
from gradfree.engines.options import check_count, check_number
from gradfree.time.forward import LayerCall


@dataclass(frozen=True, kw_only=True)
class ToleranceEngine(Engine):
    """An engine that sweeps to a tolerance, in outputs and cotangents, or falls back to running sequentially.

    Args:
        tolerance: the largest mismatch, relative to the largest state or cotangent. ``None``: 1e-12 in float64, 1e-5 in
            float32, and for other dtypes the finest tolerance that they allow. Where matrix products round their
            factors (TF32, autocast), at least 8 times that rounding error.
        max_sweeps: the most sweeps; ``None``: chosen by the engine.
        evaluation: whether layers run by sweeps without gradients, too. ``False``: outputs of evaluation are bitwise
            torch's.

    Raises:
        TypeError: an option is not a number.
        ValueError: ``tolerance`` is too fine for float64, or at least 1; ``max_sweeps`` is too small.
    """

    min_sweeps: ClassVar[int] = 1
    """The smallest allowed ``max_sweeps``."""
    namespace: ClassVar[str]
    """The engine's namespace in a chain's memory."""

    tolerance: float | None = None
    max_sweeps: int | None = None
    evaluation: bool = True

    def __post_init__(self) -> None:
        name, finest = type(self).__name__, finest_tolerance(torch.float64)
        if self.max_sweeps is not None:
            check_count(self, "max_sweeps", self.min_sweeps)
        if not isinstance(self.evaluation, bool):
            raise TypeError(f"{name}: evaluation must be True or False, not {self.evaluation!r}.")
        if self.tolerance is None:
            return
        check_number(self, "tolerance", "a number or None")
        if not finest <= self.tolerance < 1.0:
            raise ValueError(
                f"{name}: tolerance must be below 1 and at least {finest:.0e}, the finest in float64, not "
                f"{self.tolerance}."
            )

    @classmethod
    def exact_ones(cls) -> Sequence[Engine]:
        """Return the engine with its default tolerance for each dtype."""
        return (cls(),)

    def solves(self, kind: type[Site]) -> bool:
        """Return whether ``kind`` is one of chains in time."""
        return kind.dimension == "time" and super().solves(kind)

    @property
    def solves_pieces(self) -> bool:
        """Return True: gradients are exact."""
        return True

    @property
    def evaluates(self) -> bool:
        """Whether :attr:`evaluation` is on."""
        return self.evaluation

    @abstractmethod
    def may_sweep(self, call: LayerCall) -> bool:
        """Return whether sizes and options allow sweeps in a call of one of torch's layers."""

    def leave_to_torch(self, call: LayerCall) -> Sequence[Callable[[], None]] | None:
        """Leave a layer to torch's kernel if no sweeps are tried and torch is faster than the closed form.

        Returns:
            See :meth:`gradfree.Engine.leave_to_torch`: the functions count this pass in the chains' pauses. Calls that
            are never swept do not count, so that the answer for them is always the same.
        """
        memory = call.memory.of(self.namespace)
        whats = ("forward", "backward") if call.trains else ("forward",)  # No closed form without a backward pass.
        sweeps = self.may_sweep(call)
        paused = [
            each for path in call.paths for what in whats if sweeps and (each := Pass(path, what, memory)).is_paused
        ]
        if (sweeps and not paused) or (call.trains and not call.torch_is_faster):
            return None
        return [each.remember for each in paused]

    def outputs_within(self, dtype: torch.dtype) -> float:
        """Return the tolerance."""
        return tolerance_for(self.tolerance, dtype)

    def problems_with(self, site: Site) -> Iterator[str]:
        """Yield a problem if the weights are too imprecise for the tolerance."""
        yield from super().problems_with(site)
        weights = (p for block in site.blocks.values() for p in block.parameters())
        coarse = coarsest_dtype(p for p in weights if p.is_floating_point())
        if self.tolerance is not None and self.tolerance < finest_tolerance(coarse):
            yield (
                f"{path_name(site.path)} has weights of {coarse}, whose finest tolerance is "
                f"{finest_tolerance(coarse):.0e}, not {self.tolerance:.0e}. Leave tolerance out, or make it larger."
            )
