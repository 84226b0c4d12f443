"""Checks an engine's gradient during training, and switches to closer gradients if it is too far from the exact one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import isfinite, nan, sqrt
from typing import Any

import torch
from torch import Tensor

from gradfree.chains.handle import Handle
from gradfree.chains.report import path_name
from gradfree.engines.options import check_count, check_number
from gradfree.errors import ChainError

_log = logging.getLogger("gradfree")


class GradientWatch:
    """Compares the engine's gradient with the exact one every few steps, and makes it closer if needed.

    In a checked step, backpropagation solves the chains as well, for the same cotangents: one more backward pass
    through the chains, no forward pass. The two gradients of the chains' parameters are compared, and the step uses the
    exact one. Consecutive chains, such as the layers of an ``nn.GRU``, are compared separately: each gets exact
    cotangents.

    If the cosine is below ``least_cosine``, the engine gets its next better options, such as 2k sweeps for k; see
    :attr:`gradfree.Engine.sharper`. After ``rises`` such changes, or if there are no better options, training continues
    with exact gradients. The logger ``gradfree`` then logs a warning, and the next step is checked again.

    Args:
        every: the number of optimizer steps from one check to the next; the first step is checked.
        least_cosine: the smallest accepted cosine of the two gradients.
        rises: how often the engine gets better options before gradients are exact.

    Attributes:
        cosines: the cosines found, by step.
        risen: how often the engine has got better options.
        exact: whether training continues with exact gradients.

    Raises:
        TypeError: ``every`` or ``rises`` is not a whole number, or ``least_cosine`` not a number.
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

    @property
    def is_used(self) -> bool:
        """Whether it checks an engine that is attached."""
        return self._handle.attached

    def start(self, handle: Handle) -> None:
        """Start checking an attached engine, with the step count and options of this watch or of its loaded state.

        Raises:
            ChainError: layers have feedback weights, as under ``fa`` and ``eprop`` with random ones.
        """
        for path, site in handle.chains.items():
            if not site.is_chain:
                raise ChainError(
                    f"{path_name(path)} has {site}: a GradientWatch compares how chains are solved, and these layers "
                    "are no chain. Leave it out, or compare once by gradfree.gradient_fidelity."
                )
        self._handle = handle
        self._catch_up(self.risen)

    def after_step(self) -> float | None:
        """Evaluate the last optimizer step if it was checked, and return its cosine; otherwise return ``None``.

        Waits for the device after a checked step. Each rank of data parallel training reacts for itself.
        """
        seen = [sums for chain in self._handle.attachments.values() for sums in chain.differences or ()]
        step, self._step = self._step, self._step + 1
        cosine = None
        if seen:
            cosine = self.cosines[step] = _cosine(seen)
            self._next = step + self.every
            if cosine < self.least_cosine:
                self._act(step, cosine)
        self._arm()
        return cosine

    def state_dict(self) -> dict[str, Any]:
        """Return the cosines, the changes made so far and the step count."""
        done = {"risen": self.risen, "exact": self.exact, "cosines": dict(self.cosines)}
        return done | {"step": self._step, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; an engine that is already watched gets the saved options.

        Raises:
            ValueError: the engine's options are closer already than the saved ones; nothing changes then.
        """
        self.check_state(state)
        before, self.risen, self.exact = self.risen, state["risen"], state["exact"]
        self._step, self._next = state["step"], state["next"]
        self.cosines = dict(state["cosines"])
        self._catch_up(self.risen - before)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if this state is of an earlier step, with options that the engine no longer has.

        Raises:
            ValueError: it is.
        """
        if self.is_used and (state["risen"] < self.risen or (self.exact and not state["exact"])):
            raise ValueError(
                "GradientWatch: the state is of an earlier step, before the engine got closer gradients. To go back, "
                "detach the engine and attach a new one with a new GradientWatch."
            )

    def _catch_up(self, rises: int) -> None:
        for _ in range(rises):
            self._sharpen()
        self._arm()

    def _arm(self) -> None:
        for chain in self._handle.attachments.values():
            chain.use_exact = chain.use_exact or self.exact
            chain.differences = [] if not self.exact and self._step >= self._next else None

    def _sharpen(self) -> list[Any]:
        """Give each chain's engine its next options for closer gradients; return the new engines, each once."""
        better: list[Any] = []
        for chain in self._handle.attachments.values():
            if (closer := chain.engine.sharper) is not None:
                chain.engine = closer
                better += [closer] if closer not in better else []
        return better

    def _act(self, step: int, cosine: float) -> None:
        self._next = step + 1
        better = self._sharpen() if self.risen < self.rises else []
        if better:
            self.risen += 1
        else:
            self.exact = True
        _log.warning(
            "step %d: the gradient's cosine with the exact one is %.3f, below %g. Training continues with %s.",
            step,
            cosine,
            self.least_cosine,
            " and ".join(map(repr, better)) or "exact gradients",
        )


def _cosine(seen: Sequence[Tensor]) -> float:
    """Return the cosine; NaN where the exact gradient is zero or not finite, 0 where only the engine's is.

    Args:
        seen: entries of :attr:`~gradfree.chains.solving.Attachment.differences`.
    """
    product, size, exact = torch.stack([sums.to(seen[0]) for sums in seen]).sum(0).tolist()
    if not isfinite(exact) or exact == 0.0:
        return nan
    return float(product / sqrt(size * exact)) if isfinite(size) and size > 0.0 else 0.0
