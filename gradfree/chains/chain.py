"""What an engine may ask of one forward pass through a chain h_i = f_i(h_{i-1}; θ_i), i = 1..L."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent, Factor
from gradfree.chains.memory import Memory
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
    :meth:`vectors`, which go with :meth:`jacobians` and :meth:`jvps` and come back by :meth:`cotangents`.
    """

    like: Tensor
    """A state or several, for their dtype, device and last dimension, the number of units."""

    memory: Memory
    """What is kept of the chain from pass to pass, in checkpoints, too."""

    path: str = ""
    """What the chain is called in messages and figures."""

    figures: dict[str, Tensor] | None = None
    """Takes what is offered, if it is asked for: :func:`gradfree.engine_figures`."""

    deltas: dict[str, Tensor] | None = None
    """Takes δ of the state behind each block, by the block's path, if it is asked for: :meth:`.Handle.collecting`."""

    def offer(self, name: str, figure: Callable[[], Tensor]) -> None:
        """Let those who ask know a figure of how the engine solves the chain.

        Args:
            name: of the figure.
            figure: computes it, a single number that does not wait for the device; called only if it is asked for.
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
    def residual(self, weight: float = 1.0) -> Any:
        """Return the diagonal part of each F_i that the residual path carries, times ``weight``.

        Args:
            weight: from 0 to 1.

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

    def sweep_factors(self, factors: Any, exact: int) -> Any:
        """Return the factors for a sweep that is given the last ``exact`` cotangents exactly.

        What such a one sends on needs no K, whose share would be taken off and added again, rounded each time: so
        all sweeps together round as backpropagation does. Chains that round otherwise return ``factors``.
        """
        return factors

    def vjps(self, indices: Sequence[int], delta: Sequence[Cotangent]) -> Sequence[Cotangent]:
        """Return δ_i F_i of some links i, all at once: chains in depth alone have single links.

        Args:
            indices: of the links; not the first.
            delta: their cotangents.
        """
        raise NotImplementedError

    def survey(self, direct: Any) -> Sequence[LinkFindings]:
        """Return the findings of a dry run about the links; leaves the chain as it is.

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

    def jvps(self, tangents: Tensor) -> Tensor:
        """Return what reaches each state of tangents v_i of the states before it: w_i = F_i (w_{i-1} + v_{i-1}).

        Link by link from the first to the last; chains in depth alone have it.

        Args:
            tangents: N sets of them, (N, L, B, H), as :meth:`vectors` has one.

        Returns:
            The same shape; zero for the first state.

        Raises:
            ChainError: a link mixes the samples of the batch, or its VJP cannot be differentiated.
        """
        raise NotImplementedError

    @abstractmethod
    def cotangents(self, vectors: Tensor, direct: Any) -> Any:
        """Undo :meth:`vectors`, for all states that the direct cotangents ``direct`` reach."""

    @abstractmethod
    def backpropagate(self, direct: Any) -> ChainGradients:
        """Return the exact gradients, link by link from the last to the first."""

    @abstractmethod
    def gradients(self, delta: Any) -> ChainGradients:
        """Return δ_i ∂f_i/∂θ_i for all links at once, and δ_1 F_1 for the initial state."""


class Solver(ABC):
    """What solves chains: all that a chain and its recording know of an engine."""

    @property
    def needs_residual(self) -> bool:
        """Whether the engine asks for a chain's residual path."""
        return False

    @property
    def pulls_at_once(self) -> bool:
        """Whether the engine asks for the pulls of all links at once, which may be one batch."""
        return False

    @property
    def streams(self) -> bool:
        """Whether the engine runs a chain of layers again, rather than have its activations stored."""
        return False

    @property
    def sharper(self) -> Any:
        """The engine with the next better gradients that its options make, at a higher cost; ``None``: no such."""
        return None

    @property
    def reads_states(self) -> bool:
        """Whether the engine asks for the values of all states of a chain of layers, and not for their graphs alone."""
        return True

    @property
    def forwards(self) -> Sequence[Any]:
        """Its own :class:`~gradfree.time.forward.Forward` s, the best first; torch's run what none of them allows."""
        return ()

    def leave_to_torch(self, call: Any) -> Callable[[], None] | None:
        """Return whether a call of a recurrent layer is left to torch's own kernel, both passes: here, never.

        An engine with exact gradients leaves what it would not solve faster.

        Args:
            call: a :class:`~gradfree.time.forward.LayerCall`, what is known before it runs.

        Returns:
            What to do once its backward pass runs; ``None``: the engine solves it.
        """
        return None

    def outputs_within(self, dtype: torch.dtype) -> float:
        """Return how far outputs may be from the model's own, relative to the largest; 0.0: not a bit.

        An engine that says otherwise solves chains to that tolerance, and may look at its mismatch once a sweep.

        Args:
            dtype: of the states.
        """
        return 0.0

    @abstractmethod
    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients of ``chain`` for the direct cotangents e_i of its states.

        Must be linear in ``direct`` (loss scaling and gradient accumulation rely on it) and must not wait for
        the device.
        """
