"""A GRU on a CPU, step by step, that keeps its gates for the backward pass.

Recomputing the gates costs two matrix products over all steps; keeping them costs a Python loop over the steps. The
operations and their order are those of torch's kernel, so that outputs are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Gates(NamedTuple):
    """The gates of all steps of a GRU.

    Attributes:
        reset_update: r and z, (T, B, 2H).
        new: n, (T, B, H).
        hidden: Q_n, the part of n's pre-activation that comes from the state, (T, B, H).
    """

    reset_update: Tensor
    new: Tensor
    hidden: Tensor


def gru_with_gates(x: Tensor, h: Tensor, weights: Sequence[Tensor], reverse: bool = False) -> tuple[Tensor, Gates]:
    """Return the outputs (T, B, H) and the gates, for ``x`` (T, B, I) and the initial state ``h`` (B, H).

    With ``reverse`` the steps run from the last input to the first; outputs and gates are in the order of the steps.
    """
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, h.new_zeros(()))
    (steps, batch, _), units = x.shape, h.shape[1]
    fed = F.linear(x, w_ih, b_ih)
    if reverse:  # Not of ``x``: the product would round differently.
        fed = fed.flip(0)
    out = x.new_empty(steps, batch, units)
    # r, z and n overwrite their pre-activations.
    reset_update, new = fed.split([2 * units, units], -1)
    gates = Gates(reset_update, new, torch.empty_like(out))
    w, q = w_hh.t(), fed.new_empty(batch, 3 * units)
    q_rz, q_n = q.split([2 * units, units], -1)
    product = torch.empty_like(q_n, memory_format=torch.contiguous_format)
    views = (*gates.reset_update.split(units, -1), *gates, out)
    for r, z, rz, n, hidden, after in zip(*(whole.unbind(0) for whole in views), strict=True):
        torch.addmm(b_hh, h, w, out=q)
        rz.add_(q_rz).sigmoid_()
        hidden.copy_(q_n)
        n.add_(torch.mul(q_n, r, out=product)).tanh_()
        torch.sub(h, n, out=after).mul_(z).add_(n)
        h = after
    return out, gates
