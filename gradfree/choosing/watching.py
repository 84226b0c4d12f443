"""Watching the gradient of a training that an engine approximates: where its bias matters, it is made to be less."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import isfinite, nan, sqrt
from typing import Any

import torch

from gradfree.chains.handle import Handle
from gradfree.engines.options import check_count, check_number

_log = logging.getLogger("gradfree")


class GradientWatch:
    """Looks every few steps at how close the engine's gradient is to backpropagation's, and acts where it matters.

    In a step that it looks at, backpropagation solves the chains a second time, after the engine, for the same
    cotangents: one more backward pass through the chains, no forward pass. The two gradients of the chains' parameters
    are compared, and the step gets the exact one. Of chains in a row, as layers of an ``nn.GRU``, each is judged alone.

    It acts if the cosine is below ``least_cosine``: the engine takes its next better options, k for 2k,
    :attr:`gradfree.Engine.sharper`; after ``rises`` of these, or where there are none, training goes on with exact
    gradients. The logger ``gradfree`` says so, a warning. It looks again at the next step.

    Args:
        every: steps of the optimizer from one look to the next; the first step is one.
        least_cosine: between the two gradients.
        rises: how often better options are taken before gradients are exact.

    Attributes:
        cosines: what it has seen, by step.
        risen: how often the engine has taken better options.
        exact: whether training goes on with exact gradients.

    Raises:
        TypeError: ``every`` or ``rises`` is no whole number, ``least_cosine`` no number.
        ValueError: ``every`` below 1, ``rises`` below 0, ``least_cosine`` not between -1 and 1.
    """

    def __init__(self, every: int = 100, least_cosine: float = 0.99, rises: int = 3):
        self.every, self.least_cosine, self.rises = every, least_cosine, rises
        check_number(self, "least_cosine", "a number")
        if not -1.0 < least_cosine < 1.0:
            raise ValueError(f"GradientWatch: least_cosine must be between -1 and 1, not {least_cosine}.")
        check_count(self, "every", least=1)
        check_count(self, "rises", least=0)
        self.cosines: dict[int, float] = {}
        self.exact, self.risen = False, 0
        self._step, self._next = 0, 0
        self._handle = Handle()

    def start(self, handle: Handle) -> None:
        """Watch an engine that has been attached, from where this, or the watch it was loaded from, left off."""
        self._handle = handle
        self._catch_up(self.risen)

    def after_step(self, lowest: Callable[[float], float] = lambda cosine: cosine) -> float | None:
        """Look at the step that the optimizer has taken, if it is one to look at; return the cosine then.

        Waits for the device at such a step.

        Args:
            lowest: returns the lowest of the cosines of all ranks; they act together then.
        """
        seen = self._handle.compared()
        step, self._step = self._step, self._step + 1
        cosine = None
        if seen is not None:
            cosine = self.cosines[step] = lowest(_cosine(seen))
            self._next = step + self.every
            if cosine < self.least_cosine:
                self._act(step, cosine)
        self._arm()
        return cosine

    def state_dict(self) -> dict[str, Any]:
        """Return what it has seen and done."""
        done = {"risen": self.risen, "exact": self.exact, "cosines": dict(self.cosines)}
        return done | {"step": self._step, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; an engine that is watched already takes the options that it had then."""
        before, self.risen, self.exact = self.risen, state["risen"], state["exact"]
        self._step, self._next = state["step"], state["next"]
        self.cosines = dict(state["cosines"])
        self._catch_up(self.risen - before)

    def _catch_up(self, rises: int) -> None:
        for _ in range(rises):
            self._handle.sharpen()
        if self.exact:
            self._handle.use_exact_gradients()
        self._arm()

    def _arm(self) -> None:
        self._handle.compare(not self.exact and self._step >= self._next)

    def _act(self, step: int, cosine: float) -> None:
        self._next = step + 1
        better = self._handle.sharpen() if self.risen < self.rises else None
        if better is None:
            self.exact = True
            self._handle.use_exact_gradients()
        else:
            self.risen += 1
        _log.warning(
            "step %d: the gradient's cosine with the exact one is %.3f, below %g. Training goes on with %s.",
            step,
            cosine,
            self.least_cosine,
            better or "exact gradients",
        )


def _cosine(seen: torch.Tensor) -> float:
    """Return the cosine; NaN where the exact gradient is zero or not finite, 0 where only the engine's is."""
    product, size, exact = seen.tolist()
    if not isfinite(exact) or exact == 0.0:
        return nan
    return float(product / sqrt(size * exact)) if isfinite(size) and size > 0.0 else 0.0
