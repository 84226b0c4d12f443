"""Difference target propagation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.memory import Memory
from gradfree.engines.draws import new_generator
from gradfree.engines.options import check_positive
from gradfree.errors import ChainError
from gradfree.feedback.random_feedback import FeedbackEngine
from gradfree.layers.layer_chain import LayerChain, normalised, scaled
from gradfree.layers.roles import Role


@dataclass(frozen=True, kw_only=True)
class TargetPropagation(FeedbackEngine):
    """Difference target propagation: learned inverses of the layers send targets back, in place of errors.

    Lee, Zhang, Fischer and Bengio, "Difference target propagation", 2015, arXiv 1412.7525, algorithm 1. A layer f_l has
    weights, and all that follows up to the next one. The last hidden state gets the target ĥ = h - step · e, with its
    exact error e; below, ĥ_{l-1} = h_{l-1} + g_l(ĥ_l) - g_l(h_l) (eq. 15). Each layer is trained towards its target by
    δ_l = (h_l - ĥ_l) / step, and the last one by its exact error. The inverse is g_l(h) = φ(V_l h + c_l), with the
    pointwise functions φ that have made h_{l-1}. It learns by ‖g_l(f_l(h + ε)) - (h + ε)‖² (eq. 14), with noise ε, once
    each optimizer step, by normalised gradient descent: ``rate`` divided by the mean square of what V_l multiplies.

    Errors are normalised for the targets and scaled back, sample by sample, so that gradients are linear in the loss.
    Modules before the chain get the target of its input, by one more inverse.

    Needs nothing but plain layers. Costs a matrix (inputs, outputs) a layer, and about another training step.

    Args:
        step: how far the last hidden state's target is, for an error of norm one.
        sigma: the standard deviation of ε.
        rate: of the inverses' learning.
        seed: of the untrained inverses and of ε.
    """

    step: float = 0.1
    sigma: float = 0.1
    rate: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("step", "sigma", "rate"):
            check_positive(self, option)

    @property
    def runs_again(self) -> bool:
        """True: inverses learn from layers run on noisy states."""
        return True

    def learn(self, chain: Chain, memory: Memory) -> None:
        """Take one step of learning of each inverse."""
        assert isinstance(chain, LayerChain)
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            raise ChainError("TargetPropagation learns its inverses on one rank only: each would learn other ones.")
        device = chain.like.device
        generator = new_generator(chain, "target_propagation", self.seed, device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for before, after in self._inverted(chain):
                h = chain.input_of(before)
                noisy = h + self.sigma * torch.randn(h.shape, generator=generator, device=device).to(h)
                out, matrix = chain.run_part(before, after, noisy), self._matrix(chain, before, after)
                with torch.enable_grad():
                    miss = self._inverse(chain, before, matrix.requires_grad_(), out) - noisy.flatten(1)
                    (slope,) = torch.autograd.grad(miss.pow(2).sum() / (2 * len(h)), matrix)
                size = 1 + out.to(matrix.dtype).flatten(1).pow(2).sum(1).mean()
                key = f"{chain.links[before].path} {tuple(matrix.shape)}"
                memory.of("feedback")[key] = matrix.detach() - self.rate * slope / size

    def layer_gradients(self, chain: LayerChain, error: Tensor) -> ChainGradients:
        """Return the gradients of every layer, from its target."""
        total, last = chain.zero(), chain.links[chain.last]
        exact = None if last.state is None else chain.vjp(last, error)
        chain.add(last, error, total)  # Frees its graph.
        if exact is None:
            return total
        unit, norms = normalised(exact)
        shift = -self.step * unit
        for before, after in reversed(list(self._layers(chain))):
            delta = chain.vjp_part(before + 1, after, scaled(shift, norms) / -self.step)
            link = chain.links[before]
            chain.add(link, delta, total)
            if link.state is None:
                return total
            h, matrix = chain.input_of(after), self._matrix(chain, before, after)
            moved, rest = (self._inverse(chain, before, matrix, x) for x in (h + shift, h))
            shift = (moved - rest).view(chain.shape(before))
        initial = scaled(shift, norms) / -self.step
        return total._replace(initial=chain.vjp_part(0, self._first(chain), initial))

    def _first(self, chain: LayerChain) -> int:
        return chain.roles.index(Role.WEIGHTS)

    def _layers(self, chain: LayerChain) -> Iterator[tuple[int, int]]:
        """Yield the index of each layer's first link and of the next layer's, without the last layer."""
        return pairwise(i for i, role in enumerate(chain.roles) if role is Role.WEIGHTS)

    def _inverted(self, chain: LayerChain) -> Iterator[tuple[int, int]]:
        """Yield the layers that have an inverse: those whose input needs an error."""
        return ((i, end) for i, end in self._layers(chain) if chain.links[i].state is not None)

    def _matrix(self, chain: LayerChain, before: int, after: int) -> Tensor:
        """Return V and c of a layer's inverse, (inputs, outputs + 1)."""
        inputs, outputs = (chain.shape(i)[1:].numel() for i in (before, after))
        return self.matrix(chain.memory, chain.links[before].path, (inputs, outputs + 1), chain.like).detach()

    def _inverse(self, chain: LayerChain, before: int, matrix: Tensor, out: Tensor) -> Tensor:
        """Return g(``out``), (N, inputs)."""
        found = F.pad(out.to(matrix.dtype).flatten(1), (0, 1), value=1.0) @ matrix.t()
        start = max((i for i in range(before) if chain.roles[i] is Role.WEIGHTS), default=before)
        for i in range(start, before):
            if chain.roles[i] is Role.POINTWISE:
                found = chain.links[i].block.forward(found)
        return found
