"""Solves a chain by its engine or, for comparison, by backpropagation; reports figures of the solution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from gradfree.chains.chain import Chain, ChainGradients, Solver
from gradfree.chains.lesson import Lesson
from gradfree.chains.memory import Memory
from gradfree.chains.survey import LinkFindings, products
from gradfree.devices.hardware import without_tf32
from gradfree.errors import CHUNK_TWICE
from gradfree.wording import one

Figures = dict[str, dict[str, Tensor]]

_listeners: list[Figures] = []
"""The open :func:`engine_figures` blocks. Not a context variable: autograd solves chains on a GPU in other threads."""


class Attachment:
    """An engine on one chain of a model.

    Attributes:
        engine: solves for the gradients.
        path: module path of the chain.
        solved: the paths of the blocks that the engine has computed gradients for; shared with the ``Site``.
        memory: tensors of the chain that last from pass to pass.
        batched: whether the VJPs of equal blocks run as one batch.
        use_exact: whether backpropagation solves the chain instead of the engine.
        differences: collects g · g*, ‖g‖² and ‖g*‖² of every pass, with g the engine's gradients of the parameters and
            g* the exact ones, which are then returned. ``None``: passes are not compared.
        has_rivals: whether other engines take turns with this one.
        deltas: collects the cotangents of the blocks' outputs, by path; ``None``: not wanted. A recurrent layer has one
            entry for all steps, under its name in figures. If a block runs several times, the last δ is kept.
        lesson: targets and loss of the batch, while they are given.
        frozen: whether the engine's own tensors do not learn now.
        taught: the chains that they have learnt from since the last step of the optimizer.
        surveys: collects the findings about each solved chain, by its path, in a dry run; ``None`` otherwise.

    Args:
        buffers: the ``_buffers`` of the model's modules, which another run of the model must not change.
        outside: the ``_parameters`` of the model's modules outside of its chains, which blocks may use as well. Not the
            modules: graphs keep the attachment alive, so a model that stores a state would never be freed.
    """

    def __init__(
        self,
        engine: Solver,
        path: str,
        solved: set[str],
        outside: Sequence[Mapping[str, Tensor | None]] = (),
        batched: Literal["auto"] | bool = False,
        buffers: Sequence[dict[str, Tensor | None]] = (),
    ):
        self.engine, self.path, self.solved, self.batched = engine, path, solved, batched
        self._outside, self._buffers = outside, buffers
        self.lesson = Lesson()
        self.frozen, self.taught = False, set[str]()
        self.memory = Memory()
        self.use_exact = False
        self.differences: list[Tensor] | None = None
        self.has_rivals = False
        self.deltas: dict[str, Tensor] | None = None
        self.surveys: dict[str, list[Sequence[LinkFindings]]] | None = None

    @property
    def compares(self) -> bool:
        """Whether chains are solved twice, so that their graphs must survive the first time."""
        return self.differences is not None

    def outside_parameters(self) -> Iterator[Tensor]:
        """Yield the model's parameters outside of its chains."""
        for own in self._outside:
            yield from (p for p in own.values() if p is not None)

    def refuse_second_solution(self, ctx: Any) -> None:
        """Note on a pass's context that the engine solves it; raise if it has and carries something from pass to pass.

        Raises:
            ChainError: the pass is one of a stream and was solved before.
        """
        if self.use_exact:
            return
        if getattr(ctx, "is_solved", False) and self.engine.continues:
            raise CHUNK_TWICE.error(path=self.path or "the layer")
        ctx.is_solved = True

    def solve(self, chain: Chain, direct: Any, name: str | None = None) -> ChainGradients:
        """Return the gradients of ``chain``: the engine's, or backpropagation's.

        Args:
            chain: the chain.
            direct: the direct cotangents of its states.
            name: the chain's name in messages and figures; by default its path.
        """
        chain.path, chain.deltas = self.path if name is None else name, self.deltas
        if self.use_exact:
            return self.engine.exact_gradients(chain, direct)
        # TF32 rounding would count as an error of the engine.
        with without_tf32() if self.compares else nullcontext():
            return self._solve(chain, direct)

    def _solve(self, chain: Chain, direct: Any) -> ChainGradients:
        listeners = tuple(_listeners)
        chain.figures = {} if listeners else None
        if self.surveys is not None:
            self.surveys.setdefault(self.path, []).append(chain.survey(direct))
        if self.engine.needs:
            self.lesson.check(self.engine.needs, type(self.engine).__name__)
        chain.lesson = replace(self.lesson, buffers=self._buffers)
        if not self.frozen and chain.path not in self.taught:
            self.taught.add(chain.path)
            self.engine.learn(chain, self.memory)
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
        exact = self.engine.exact_gradients(chain, direct)
        self.differences.append(products(gradients.parameters, exact.parameters))
        return exact


def offer_figure(path: str, name: str, figure: Callable[[], Tensor]) -> None:
    """Report a figure about the module or loop at ``path``, as :meth:`Chain.offer` does about a chain."""
    for figures in tuple(_listeners):
        with torch.no_grad():
            figures.setdefault(path, {})[name] = figure()


@contextmanager
def engine_figures() -> Iterator[Figures]:
    """Collect figures of how engines solve their chains, in all backward passes inside the ``with``, of any model.

    Costs one more sweep a chain, except for engines that sweep to a tolerance. The gradients are bitwise the same. The
    figures depend on the engine:

    - "sweeps": their number.
    - "residual": how much one more sweep would change the cotangents of all states, relative to their norm; with a
      tolerance, how much the last sweep has changed them.
    - "drift": the largest ‖W Wᵀ - I‖ of the weights that are kept orthogonal.
    - "mismatch": at the borders of segments, or after Newton's sweeps; "forward mismatch" is that of the forward pass.
    - "packed in runs", "packed as a grid", "packed as a whole": under the path of a recurrent module with packed
      sequences of several lengths, in how many calls of each layer and direction they ran.
    - "tolerance", "forward tolerance": the tolerance that the mismatch was compared with. It is coarser where matrix
      products round their factors, as under autocast or in TF32.
    - "sequential", "forward sequential": whether the engine fell back to running sequentially.

    Yields:
        The figures of each chain's last pass, by the chain's module path and the figure's name: single numbers on their
        devices. Backward passes fill it. A recurrent module has a chain for each layer and direction, named like its
        weights: "rnn.l0", "rnn.l0_reverse".
    """
    figures: Figures = {}
    _listeners.append(figures)
    try:
        yield figures
    finally:
        # By identity: two empty dicts are equal.
        _listeners[:] = [listener for listener in _listeners if listener is not figures]
