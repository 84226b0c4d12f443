"""Handing a chain over to its engine or, for comparison, to backpropagation; reporting how the engine solves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent
from gradfree.chains.chain import Chain, ChainGradients, Solver
from gradfree.chains.memory import Memory
from gradfree.chains.survey import LinkFindings
from gradfree.devices.hardware import without_tf32
from gradfree.wording import one

Figures = dict[str, dict[str, Tensor]]

_listeners: list[Figures] = []
"""Who is sent figures now. Not a context variable: autograd solves chains on a GPU in other threads."""


class Attachment:
    """An engine on one chain of a model: what every recording of the chain needs of it.

    Attributes:
        engine: solves for the gradients.
        path: module path of the chain.
        solved: the paths of the blocks that it has computed gradients of: the chain's own set.
        memory: what is kept of the chain from pass to pass.
        batched: whether blocks that are alike are pulled through in batches.
        use_exact: whether backpropagation solves the chain in the engine's place.
        differences: takes g · g*, ‖g‖² and ‖g*‖² of every pass, g the engine's gradients of the parameters and g* those
            of backpropagation, which are the ones returned then. ``None``: no pass is compared.
        has_rivals: whether other engines take turns with this one.
        deltas: takes the cotangents of the states behind blocks, by path, if they are asked for.
        surveys: takes the findings about each chain that is solved, in a dry run.

    Args, where they are no attributes:
        outside: the parameters of the model's modules that lie in no chain, which blocks may use all the same. Not the
            modules: graphs keep the attachment, and a model that keeps a state would never be freed.
    """

    def __init__(
        self,
        engine: Solver,
        path: str,
        solved: set[str],
        outside: Sequence[Mapping[str, Tensor | None]] = (),
        batched: Literal["auto"] | bool = False,
    ):
        self.engine, self.path, self.solved, self.batched = engine, path, solved, batched
        self._outside = outside
        self.memory = Memory()
        self.use_exact = False
        self.differences: list[Tensor] | None = None
        self.has_rivals = False
        self.deltas: dict[str, Tensor] | None = None
        self.surveys: list[Sequence[LinkFindings]] | None = None

    @property
    def compares(self) -> bool:
        """Whether chains are solved twice, so that their graphs must survive the first time."""
        return self.differences is not None

    def outside_parameters(self) -> Iterator[Tensor]:
        """Yield the parameters that the model has outside of its chains."""
        for own in self._outside:
            yield from (p for p in own.values() if p is not None)

    def solve(self, chain: Chain, direct: Any, name: str | None = None) -> ChainGradients:
        """Return the gradients of ``chain``: the engine's, or backpropagation's.

        Args:
            chain: the chain.
            direct: the direct cotangents of its states.
            name: what the chain is called in messages and figures; its path, if left out.
        """
        chain.path, chain.deltas = self.path if name is None else name, self.deltas
        if self.use_exact:
            return chain.backpropagate(direct)
        # Its roundings would be taken for the engine's.
        with without_tf32() if self.compares else nullcontext():
            return self._solve(chain, direct)

    def _solve(self, chain: Chain, direct: Any) -> ChainGradients:
        listeners = tuple(_listeners)
        chain.figures = {} if listeners else None
        if self.surveys is not None:
            self.surveys.append(chain.survey(direct))
        gradients = self.engine.gradients(chain, direct)
        if not isinstance(gradients, ChainGradients):
            raise TypeError(
                f"{type(self.engine).__name__}.gradients must return what chain.gradients(delta) or "
                f"chain.backpropagate(direct) returns, not {one(type(gradients).__name__)}."
            )
        for figures in listeners:
            figures[chain.path] = dict(chain.figures or {})
        if self.differences is None:
            return gradients
        exact = chain.backpropagate(direct)
        self.differences.append(_agreement(zip(gradients.parameters, exact.parameters, strict=True)))
        return exact


@torch.no_grad()
def _agreement(pairs: Iterable[tuple[Cotangent, Cotangent]]) -> Tensor:
    """Return what :attr:`Attachment.differences` takes, on the gradients' device."""
    total = torch.zeros(3)
    for g, exact in pairs:
        if exact is not None:
            wide = torch.promote_types(exact.dtype, torch.float32)
            b = exact.detach().flatten().to(wide)
            a = torch.zeros_like(b) if g is None else g.detach().flatten().to(wide)
            total = total.to(b) + torch.stack([a @ b, a @ a, b @ b])
    return total


@contextmanager
def engine_figures() -> Iterator[Figures]:
    """Ask engines how they solve their chains in the backward passes inside the block, of whatever model.

    Costs one more sweep a chain, but where an engine sweeps until a tolerance; the gradients are bit for bit the same
    as without. What there is depends on the engine: "sweeps", their number; "residual", the norm of what one more sweep
    would change in the cotangents of all states, relative to theirs, or with a tolerance of what the last one has
    changed; "drift", the largest ‖W Wᵀ - I‖ of the weights that are kept orthogonal;
    "mismatch" at the borders of segments or behind Newton's sweeps, and "sequential", whether they were given up, of
    both passes ("forward mismatch").

    Yields:
        The figures of each chain's last pass, single numbers on their devices: filled by the backward passes, by module
        path of the chain and name of the figure. A recurrent module has a chain for each layer and direction, named
        like its weights: "rnn.l0", "rnn.l0_reverse".
    """
    figures: Figures = {}
    _listeners.append(figures)
    try:
        yield figures
    finally:
        # By identity: two that are empty are equal.
        _listeners[:] = [listener for listener in _listeners if listener is not figures]
