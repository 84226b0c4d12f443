"""What an engine may ask of one forward pass through a chain h_i = f_i(h_{i-1}; θ_i), i = 1..L."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent, Factor
from gradfree.chains.survey import LinkFindings


class ChainGradients(NamedTuple):
    """The gradients that leave a chain; ``None`` where ordinary backpropagation would give ``None``.

    Attributes:
        initial: the gradient of h_0, the state that enters the chain, part by part if it has several.
        inputs: of the other tensors that its blocks were given, in the order of their first use.
        parameters: of the chain's trainable parameters, each once.
    """

    initial: Any
    inputs: list[Cotangent]
    parameters: list[Cotangent]


class Chain(ABC):
    """One recorded forward pass, linearised: the Jacobians F_i = ∂h_i/∂h_{i-1}, as products or as matrices.

    An engine turns the direct cotangents e_i (what the loss sends to each state itself) into the cotangents
    δ_i = e_i + δ_{i+1} F_{i+1}, exactly or not. The chain has the two operations for that, :meth:`pull` and
    :meth:`scan`, and the last step, the same for every engine: :meth:`gradients`. The containers of cotangents
    and of factors are the chain's own affair; engines only hand them on, or ask for them as plain tensors: as
    :meth:`vectors`, which go with :meth:`jacobians` and come back by :meth:`cotangents`.
    """

    like: Tensor
    """A state or several, for their dtype, device and last dimension, the number of units."""

    path: str = ""
    """What the chain is called in messages and figures."""

    figures: dict[str, Tensor] | None = None
    """Takes what is offered, where somebody asks: :func:`gradfree.engine_figures`."""

    def offer(self, name: str, figure: Callable[[], Tensor]) -> None:
        """Let those who ask know a figure of how the engine solves the chain.

        Args:
            name: of the figure.
            figure: computes it, a single number that does not wait for the device; called only if somebody asks.
                Must leave everything as it is.
        """
        if self.figures is not None:
            with torch.no_grad():
                self.figures[name] = figure()

    @abstractmethod
    def __len__(self) -> int:
        """L, the number of links."""

    @abstractmethod
    def constant(self, factor: Factor) -> Any:
        """Return the factors K_i = diag(``factor``), a number or one number a unit, for every link."""

    @abstractmethod
    def residual(self, weight: float = 1.0, block: bool = False) -> Any:
        """Return the diagonal part of each F_i that the residual path carries, times ``weight``.

        Args:
            weight: from 0 to 1.
            block: whether to take, of states with several parts, also what the path carries from part to part of
                the same unit.

        Raises:
            ChainError: no link has a residual path.
        """

    @abstractmethod
    def mean_residual(self, momentum: float) -> Any:
        """Return the running mean over passes of the residual path's diagonal, the same for all links.

        Args:
            momentum: the share of this pass in the new mean; the first pass's mean is its own.

        Raises:
            ChainError: no link has a residual path.
        """

    @abstractmethod
    def scan(self, terms: Any, factors: Any) -> Any:
        """Solve δ_i = terms_i + δ_{i+1} K_{i+1}."""

    @abstractmethod
    def pull(self, direct: Any, delta: Any, factors: Any) -> Any:
        """Return e_i + δ_{i+1} (F_{i+1} - K_{i+1}) for all i at once."""

    def beyond(self, factors: Any, exact: int) -> Any:
        """Return the factors for a sweep that is given the last ``exact`` cotangents exactly.

        What such a one sends on needs no K, whose share would be taken off and added again, rounded each time: so
        all sweeps together round as backpropagation does. Chains that round otherwise return ``factors``.
        """
        return factors

    def in_step(self, ends: Sequence[int]) -> Chain:
        """Return the chain as it is best pulled through in segments, the links that are as far from their ends at once.

        Args:
            ends: the indices of the segments' last links.
        """
        return self

    def carried(self, indices: Sequence[int], delta: Sequence[Cotangent]) -> Sequence[Cotangent]:
        """Return δ_i F_i of some links i, all at once: chains in depth alone have single links.

        Args:
            indices: of the links; not the first.
            delta: their cotangents.
        """
        raise NotImplementedError

    def survey(self, direct: Any) -> Sequence[LinkFindings]:
        """Return what there is to tell of the links to who asks before training; leaves the chain as it is.

        Args:
            direct: the direct cotangents of its states.
        """
        return [LinkFindings(self.path, steps=len(self))]

    @abstractmethod
    def vectors(self, cotangents: Any) -> Tensor:
        """Return the cotangents of all states as row vectors, (L, B, H), in single precision at least.

        B is the number of samples, H the largest number of elements that a state has of one sample; smaller states are
        filled up with zeros, as is what has no cotangent.

        Raises:
            ChainError: the states have different numbers of samples.
        """

    @abstractmethod
    def jacobians(self) -> Tensor:
        """Return F_2 to F_L of every sample as matrices, (L - 1, B, H, H), as :meth:`vectors` has it.

        Raises:
            ChainError: a link mixes the samples of the batch.
        """

    @abstractmethod
    def cotangents(self, vectors: Tensor, direct: Any) -> Any:
        """Undo :meth:`vectors`, for all states that the direct cotangents ``direct`` reach."""

    @abstractmethod
    def backpropagate(self, direct: Any) -> ChainGradients:
        """Return the exact gradients, link by link from the last to the first."""

    @abstractmethod
    def gradients(self, delta: Any) -> ChainGradients:
        """Return δ_i ∂f_i/∂θ_i for all links at once, and δ_1 F_1 for the initial state."""


class Solver(Protocol):
    """What solves chains: all that a chain and its recording know of an engine."""

    @property
    def streams(self) -> bool:
        """Whether a chain of layers is run again, rather than have its activations stored."""

    @property
    def reads_states(self) -> bool:
        """Whether it asks for the values of all states of a chain of layers, and not for their graphs alone."""

    @property
    def needs_residual(self) -> bool:
        """Whether it asks for a chain's residual path."""

    @property
    def pulls_at_once(self) -> bool:
        """Whether it asks for the pulls of all links at once."""

    @property
    def sharper(self) -> Solver | None:
        """It with its next better options, ``None`` if there are none."""

    @property
    def forwards(self) -> Sequence[Any]:
        """Its own ways to run chains in time forward, the best first; see ``gradfree.time.forward``."""

    def leaves(self, call: Any) -> Callable[[], None] | None:
        """Return what to do in the backward pass if a recurrent layer is left to torch; see ``Engine.leaves``."""

    def outputs_within(self, dtype: torch.dtype) -> float:
        """Return how far outputs may be from the model's own, relative to the largest; 0.0: not a bit."""

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients of ``chain`` for the direct cotangents e_i of its states."""
