"""Difference target propagation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfree.chains.chain import ChainGradients
from gradfree.engines.draws import new_generator, normal
from gradfree.engines.options import check_positive
from gradfree.feedback.random_feedback import LearnedFeedbackEngine
from gradfree.layers.layer_chain import LayerChain, normalised, scaled


@dataclass(frozen=True, kw_only=True)
class TargetPropagation(LearnedFeedbackEngine):
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

    def learn_layers(self, chain: LayerChain) -> None:
        """Take one step of learning of each inverse."""
        generator = new_generator(chain, "target_propagation", self.seed, chain.like.device)
        for before, after in chain.layers:
            if chain.links[before].state is None:
                continue
            h = chain.input_of(before)
            noisy = h + self.sigma * normal(generator, h.shape, h)
            out, matrix = chain.run_part(before, after, noisy), self._matrix(chain, before, after)
            with torch.enable_grad():
                miss = self._inverse(chain, before, matrix.requires_grad_(), out) - noisy.flatten(1)
                (slope,) = torch.autograd.grad(miss.pow(2).sum() / (2 * len(h)), matrix)
            size = 1 + out.to(matrix.dtype).flatten(1).pow(2).sum(1).mean()
            matrix, change = matrix.detach(), self.rate * slope / size
            # Not from an overflow or an empty batch, of which nothing would recover.
            learnt = torch.where(change.isfinite().all(), matrix - change, matrix)
            self.replace(chain.memory, chain.links[before].path, learnt)

    def layer_gradients(self, chain: LayerChain, error: Tensor) -> ChainGradients:
        """Return the gradients of every layer, from its target."""
        total = chain.zero()
        exact = chain.backward(chain.links[chain.last], error, total)
        if exact is None:
            return total
        unit, norms = normalised(exact)
        shift = -self.step * unit
        for before, after in reversed(chain.layers):
            delta = chain.vjp_part(before + 1, after, scaled(shift, norms) / -self.step)
            chain.add(chain.links[before], delta, total)
            if chain.links[before].state is None:
                return total
            h, matrix = chain.input_of(after), self._matrix(chain, before, after)
            moved, rest = (self._inverse(chain, before, matrix, x) for x in (h + shift, h))
            shift = (moved - rest).view(chain.shape(before))
        return total._replace(initial=chain.vjp_part(0, chain.weighted[0], scaled(shift, norms) / -self.step))

    def _matrix(self, chain: LayerChain, before: int, after: int) -> Tensor:
        """Return V and c of the inverse of the layer from link ``before`` to ``after``, (inputs, outputs + 1)."""
        inputs, outputs = (chain.shape(i)[1:].numel() for i in (before, after))
        return self.matrix(chain.memory, chain.links[before].path, (inputs, outputs + 1), chain.like).detach()

    def _inverse(self, chain: LayerChain, before: int, matrix: Tensor, out: Tensor) -> Tensor:
        """Return g(``out``), (N, inputs)."""
        return chain.activated(before, F.pad(out.to(matrix.dtype).flatten(1), (0, 1), value=1.0) @ matrix.t())
