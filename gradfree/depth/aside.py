"""Gradients that enter the blocks of a chain beside their states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent, plus
from gradfree.chains.chain import ChainGradients
from gradfree.depth.link import Link, walking
from gradfree.torchside.hooks import without_hooks


def pull_aside(
    links: Sequence[Link],
    parameters: Sequence[Tensor],
    given: Mapping[tuple[int, int], Tensor],
    direct: list[Cotangent],
    total: ChainGradients,
) -> ChainGradients:
    """Pull what the loss sends to tensors that blocks return beside their states, as router losses do.

    All in one autograd call, before the engine solves: what comes back to a block's state is a direct cotangent of the
    state before it, and no engine need know where that is from.

    Args:
        links: the links of the pass.
        parameters: those of the chain.
        given: the cotangents, by the number of a link and that of a tensor in its ``aside``.
        direct: the direct cotangents of the states, which are added to.
        total: what has come to the chain's inputs and parameters by other ways.

    Returns:
        The new total.
    """
    reached = [links[i] for i in sorted({i for i, _ in given})]
    entries = [(i, n, edge) for i in sorted({i for i, _ in given}) for n, edge in links[i].entries]
    numbers = sorted({n for link in reached for n in link.parameters if parameters[n].requires_grad})
    leaves = [parameters[n] for n in numbers]
    if not entries and not leaves:
        return total
    with walking(reached, list(given.values())), without_hooks(leaves):
        grads = iter(
            torch.autograd.grad(
                [links[i].aside[n] for i, n in given],
                [*(edge for *_, edge in entries), *leaves],  # type: ignore[arg-type]
                [links[i].given(cotangent) for (i, _), cotangent in given.items()],
                retain_graph=True,
                allow_unused=True,
            )
        )
    for i, number, _ in entries:
        total = add_inside(direct, total, i, number, next(grads))
    for n in numbers:
        total.parameters[n] = plus(total.parameters[n], next(grads))
    return total


def add_inside(
    direct: list[Cotangent], total: ChainGradients, index: int, number: int | None, cotangent: Cotangent
) -> ChainGradients:
    """Return ``total`` with a cotangent of an input of link ``index`` in it, or of the state that entered the chain.

    What the state was that an earlier link has returned is added to ``direct``.
    """
    if number is not None:
        total.inputs[number] = plus(total.inputs[number], cotangent)
    elif index:
        direct[index - 1] = plus(direct[index - 1], cotangent)
    else:
        total = total._replace(initial=plus(total.initial, cotangent))
    return total
