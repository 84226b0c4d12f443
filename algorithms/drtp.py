"""Direct random target projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradfree.algorithms.dfa import DFA
from gradfree.chains.site import Site
from gradfree.errors import ChainError
from gradfree.layers.layer_chain import LayerChain, normalised
from gradfree.layers.layer_site import Layered


@dataclass(frozen=True, kw_only=True)
class DRTP(DFA):
    """Direct random target projection: every layer gets the target through its own fixed random matrix.

    Frenkel, Lefebvre and Bol, "Learning without feedback: fixed random learning signals allow for feedforward training
    of deep neural networks", 2021, arXiv 1909.01311: δ_l = -(B_l y) ⊙ f'(a_l), with y the target, one-hot for a class.
    For a classifier y has the signs of the error y - ŷ up to a constant, so hidden layers can learn before the output
    is known. The last layer gets its exact error.

    The published rule does not depend on the loss. Here each sample's target is multiplied by the norm of its error, so
    that gradients are linear in the loss, as GradScaler and accumulation need, and end when the error does. Matrices
    and layers are those of :class:`~gradfree.algorithms.dfa.DFA` in chains of single layers.

    Needs the targets: class indices (N,), or numbers (N, outputs); of one output also (N,). Costs less than
    backpropagation: no product with a transposed weight.

    Args:
        seed: of the random matrices.
    """

    needs: ClassVar[Sequence[str]] = ("targets",)

    @property
    def kinds(self) -> list[type[Site]]:
        """Single layers with known roles."""
        return [Layered]

    def hidden_signal(self, chain: LayerChain, error: Tensor) -> Tensor:
        """Return the negative targets, times the norm of each sample's error.

        Raises:
            ChainError: the outputs are not (samples, classes), or the targets do not fit them.
        """
        self.refuse_unless_classes(chain, error)
        given: Any = torch.as_tensor(chain.lesson.targets, device=error.device)
        targets = given
        if given.shape == error.shape[:1] and error.shape[1] == 1:
            targets = given.unsqueeze(1)
        elif given.shape == error.shape[:1] and not given.is_floating_point():
            # Not one_hot(), which reads the largest class from the device.
            targets = given.unsqueeze(1) == torch.arange(error.shape[-1], device=error.device)
        if targets.shape != error.shape:
            raise ChainError(
                f"DRTP: the lesson has targets {tuple(given.shape)}, but {chain.links[chain.last].path!r} returns "
                f"{tuple(error.shape)}. Give class indices (samples,) or numbers (samples, outputs), of this batch."
            )
        _, norms = normalised(error)
        return -targets.to(norms.dtype) * norms.unsqueeze(1)
