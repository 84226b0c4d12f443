"""The interface of a recorded forward pass through a chain h_i = f_i(h_{i-1}; θ_i), i = 1..L, and of its solver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent, Factor
from gradfree.chains.lesson import Lesson
from gradfree.chains.memory import Memory
from gradfree.chains.survey import LinkFindings


class ChainGradients(NamedTuple):
    """The gradients that leave a chain; ``None`` where ordinary backpropagation would give ``None``.

    Attributes:
        initial: the gradient of h_0, the input of the first link; a tuple if the state has several parts.
        inputs: the gradients of the blocks' other tensor inputs, in the order of their first use.
        parameters: the gradients of the chain's trainable parameters, each once.
    """

    initial: Any
    inputs: list[Cotangent]
    parameters: list[Cotangent]


class Chain(ABC):
    """One recorded forward pass, linearised: the Jacobians F_i = ∂h_i/∂h_{i-1}, as products or as matrices.

    An engine turns the direct cotangents e_i (gradients of the loss that reach state i without passing link i + 1)
    into the cotangents δ_i = e_i + δ_{i+1} F_{i+1}, exactly or approximately. For that it calls :meth:`pull` and
    :meth:`scan`, and at the end :meth:`gradients`. The types that hold cotangents and factors differ between chains.
    An engine that needs plain tensors calls :meth:`vectors`, :meth:`jacobians` and :meth:`jvps`, and converts the
    result back by :meth:`cotangents`.
    """

    like: Tensor
    """A tensor with the dtype, the device and the last dimension (number of units) of the states."""

    parameters: Sequence[Tensor]
    """The trainable parameters that a link may use, in the order of their gradients."""

    memory: Memory
    """Tensors of the chain that last from pass to pass and are saved in checkpoints."""

    path: str = ""
    """The name of the chain in messages and figures."""

    lesson: Lesson = Lesson()
    """Targets and loss of the pass, where they are given; an engine names those that it :attr:`~Solver.needs`."""

    figures: dict[str, Tensor] | None = None
    """Filled by :meth:`offer` inside :func:`gradfree.engine_figures`; ``None`` outside."""

    deltas: dict[str, Tensor] | None = None
    """Filled with δ of each block's output, by path, while gradients are compared; else ``None``."""

    def offer(self, name: str, figure: Callable[[], Tensor]) -> None:
        """Report a figure about the solution, such as the number of sweeps, to :func:`gradfree.engine_figures`.

        Args:
            name: of the figure.
            figure: computes it, a single number, without waiting for the device and without side effects; called only
                inside :func:`gradfree.engine_figures`.
        """
        if self.figures is not None:
            with torch.no_grad():
                self.figures[name] = figure()

    @abstractmethod
    def __len__(self) -> int:
        """L, the number of links."""

    @abstractmethod
    def constant(self, factor: Factor) -> Any:
        """Return the factors K_i = diag(``factor``) for every link; ``factor`` is a number, or one for each unit."""

    @abstractmethod
    def residual(self, weight: float = 1.0) -> Any:
        """Return, as factors K_i, the diagonal part of each F_i that belongs to the residual path, times ``weight``.

        Args:
            weight: from 0 to 1.

        Raises:
            ChainError: no link has a residual path.
        """

    @abstractmethod
    def mean_residual(self, momentum: float) -> Any:
        """Return the running mean over passes of the residual path's diagonal, the same for all links.

        Args:
            momentum: the weight of this pass in the new mean; in the first pass it is 1.

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
        """Return the factors for a sweep in which the last ``exact`` cotangents are exact already.

        A chain may use K = 0 for these links: K would be subtracted in J and added again in the scan, with a rounding
        error each time. Then all sweeps together round as backpropagation does. By default ``factors`` are returned.
        """
        return factors

    def vjps(self, indices: Sequence[int], delta: Sequence[Cotangent]) -> Sequence[Cotangent]:
        """Return the VJPs δ_i F_i of some links i, all at once; only for chains in depth.

        Args:
            indices: of the links; not the first.
            delta: the cotangents of their outputs.
        """
        raise NotImplementedError

    def survey(self, direct: Any) -> Sequence[LinkFindings]:
        """Return the findings of a dry run about the links; does not change the chain.

        Args:
            direct: the direct cotangents of its states.
        """
        return [LinkFindings(self.path)]

    @abstractmethod
    def vectors(self, cotangents: Any) -> Tensor:
        """Return the cotangents of all states as row vectors, (L, B, H), in single precision at least.

        B is the number of samples, H the largest number of elements that a state has for one sample. Smaller states
        are padded with zeros; a state without a cotangent is zero.

        Raises:
            ChainError: the states have different numbers of samples.
        """

    @abstractmethod
    def jacobians(self) -> Tensor:
        """Return F_2 to F_L of every sample as matrices, (L - 1, B, H, H), with B and H as in :meth:`vectors`.

        Raises:
            ChainError: a link mixes the samples of the batch.
        """

    def jvps(self, tangents: Tensor) -> Tensor:
        """Return the JVPs w_i = F_i (w_{i-1} + v_{i-1}), which carry tangents v of all states to the later states.

        Runs link by link from the first to the last.

        Args:
            tangents: N sets of tangents v, (N, L, B, H), with L, B and H as in :meth:`vectors`.

        Returns:
            w, of the same shape; zero for the first state.

        Raises:
            ChainError: a link mixes the samples of the batch, or its VJP cannot be differentiated.
        """
        raise NotImplementedError

    def run(self, initial: Any = None, parameters: Sequence[Tensor] | None = None) -> Any:
        """Run the pass again without a graph; return the states h_1 to h_L, held as cotangents are.

        Random states and buffers are left as they were.

        Args:
            initial: h_0; that of the pass if left out. A tuple for a state of several parts.
            parameters: replacements of the chain's trainable parameters, in the order of their gradients.

        Raises:
            ChainError: the pass cannot be run again.
        """
        raise NotImplementedError

    @abstractmethod
    def cotangents(self, vectors: Tensor, direct: Any) -> Any:
        """Undo :meth:`vectors`, for all states that influence the loss by ``direct``."""

    @abstractmethod
    def backpropagate(self, direct: Any) -> ChainGradients:
        """Return the exact gradients, link by link from the last to the first."""

    @abstractmethod
    def gradients(self, delta: Any) -> ChainGradients:
        """Return δ_i ∂f_i/∂θ_i for all links at once, and δ_1 F_1 for the initial state."""


class Solver(ABC):
    """The interface of engines that chains and their recorders use."""

    needs: ClassVar[Sequence[str]] = ()
    """What the engine learns from besides the gradient of the loss: "targets", "loss"; see :class:`Lesson`."""

    @property
    def needs_residual(self) -> bool:
        """Whether the engine uses a chain's residual path."""
        return False

    @property
    def keeps_means(self) -> bool:
        """Whether the engine uses a chain's ``mean_residual``, a running mean that ranks have to average."""
        return False

    @property
    def pulls_at_once(self) -> bool:
        """Whether the engine asks for the VJPs of all links at once, which may then run as one batch."""
        return False

    @property
    def streams(self) -> bool:
        """Whether the engine runs a chain of layers again in the backward pass, instead of storing its activations."""
        return False

    @property
    def sharper(self) -> Any:
        """The engine with options for closer gradients at a higher cost; ``None`` if it has no such options."""
        return None

    @property
    def solves_pieces(self) -> bool:
        """Whether gradients stay right if a recurrent layer runs as several chains, one after another in time.

        Packed sequences of several lengths may then run in pieces. True for engines with exact gradients.
        """
        return False

    @property
    def continues(self) -> bool:
        """Whether a pass through a recurrent layer goes on from the one before: both must be of the same sequences."""
        return False

    @property
    def evaluates(self) -> bool:
        """Whether the engine changes how an attached model runs without gradients; Lightning attaches it there, too."""
        return False

    @property
    def forwards(self) -> Sequence[Any]:
        """Own :data:`~gradfree.time.forward.Forward` functions, best first. If none applies, torch runs."""
        return ()

    @property
    def loops(self) -> Any:
        """Runs any step function on autograd's own graph, a :data:`~gradfree.loops.recurrence.Runner`.

        ``None``: the engine only solves recorded chains.
        """
        return None

    def records_units(self, length: int, like: Tensor) -> bool:
        """Decide whether an elementwise cell is recorded as a chain, although there are :attr:`loops`: by default not.

        Args:
            length: T.
            like: a state, (B, H), whose values are not read.
        """
        return False

    def leave_to_torch(self, call: Any) -> Sequence[Callable[[], None]] | None:
        """Decide whether torch's own kernel runs both passes of a recurrent layer's call: by default never.

        An engine with exact gradients leaves calls to torch that it would not solve faster.

        Args:
            call: a :class:`~gradfree.time.forward.LayerCall`, which describes the call before it runs.

        Returns:
            Functions to call in the backward pass if torch runs the call; ``None`` if the engine solves it. Where there
            are none to call, the next call of the same sizes, dtype, device, autocast and grad mode is left to torch
            without asking: such an answer must not depend on ``call.memory``.
        """
        return None

    def outputs_within(self, dtype: torch.dtype) -> float:
        """Return the largest error of outputs, relative to the largest output; 0.0: outputs are bitwise the model's.

        An engine with another value solves chains to that tolerance, and may wait for the device once a sweep.

        Args:
            dtype: of the states.
        """
        return 0.0

    def learn(self, chain: Chain, memory: Memory) -> None:
        """Let tensors of the engine's own in ``memory`` learn from a pass; by default there are none.

        Called before :meth:`gradients`, in the first backward pass of each chain and in the first one after each step
        of the optimizer. Must replace tensors, not change them in place, and must not wait for the device.

        Args:
            chain: the pass.
            memory: the chain's memory, which checkpoints contain.
        """
        return

    def exact_gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients that the engine's are compared with: those of backpropagation."""
        return chain.backpropagate(direct)

    @abstractmethod
    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients of ``chain`` for the direct cotangents e_i of its states.

        Must be linear in ``direct`` (loss scaling and gradient accumulation rely on it) and must not wait for
        the device.
        """
