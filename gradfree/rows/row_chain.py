"""The chain of a row: equal blocks that ran without a graph, whose VJPs are computed in one batch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import vmap

from gradfree.algebra.cotangents import Cotangent, Factor, is_number, plus
from gradfree.algebra.time_scan import scan_along
from gradfree.chains.chain import ChainGradients
from gradfree.chains.survey import LinkFindings
from gradfree.depth.depth_chain import NO_RESIDUAL, DepthChain
from gradfree.depth.link import Link, check_link, local_backward
from gradfree.depth.recorder import RecordedChain
from gradfree.depth.residual import residual_factor
from gradfree.errors import ChainError
from gradfree.torchside.graph import operations, walk
from gradfree.torchside.guards import refuse_other_values
from gradfree.torchside.structure import call


class RowChain(DepthChain):
    """The links of a row. Cotangents are one tensor (L, ...); all states have one shape.

    Args:
        chain: the attached chain.
        structure: a copy of one block without its numbers, which runs in place of each block.
        tensors: the parameters and buffers of the L blocks, by name.
        parameters: those of them that need a gradient, each once.
        states: h_0 to h_L.
        initial: whether h_0 needs a gradient.
    """

    def __init__(
        self,
        chain: RecordedChain,
        structure: nn.Module,
        tensors: Mapping[str, Sequence[Tensor]],
        parameters: Sequence[Tensor],
        states: Sequence[Tensor],
        initial: bool,
    ):
        # Graphs need not survive `retain_graph`: each backward pass makes new ones.
        self._set_common(parameters, 0, chain.attachment.compares, chain)
        self.like = states[-1]
        self._blocks = list(chain.blocks.items())
        self._structure, self._tensors, self._states = structure, tensors, states
        self.initial = states[0]
        self._needs_initial = initial
        self._numbers = {id(p): n for n, p in enumerate(parameters)}
        self._span = f"{self._blocks[-1][0]} to {self._blocks[0][0]}"

    def __len__(self) -> int:
        """L, the number of links."""
        return len(self._blocks)

    @cached_property
    def links(self) -> list[Link]:  # type: ignore[override]
        """The blocks, run again one by one with a graph each: for engines that use single links."""
        return [self._link(i) for i in range(len(self))]

    def _link(self, index: int) -> Link:
        path, block = self._blocks[index]
        given = entering(self._states[index], self._needs_initial or index > 0)
        out = call(self._structure, {name: column[index] for name, column in self._tensors.items()}, given)
        self._check(out.detach(), self._states[index + 1], path)
        link = Link(path, block, out, given.grad_fn, [None], self._numbers, out.grad_fn)
        check_link(link)
        return link

    def _check(self, out: Tensor, expected: Tensor, where: str) -> None:
        """Raise if outputs differ from the forward pass: an attribute that a block reads may have changed."""
        message = (
            f"{where} gave other outputs in a batch than in the forward pass: they read a value that has changed, or "
            "that differs between the blocks. Attach with batched=False."
        )
        refuse_other_values(out, expected, min(1e3 * torch.finfo(out.dtype).eps, 0.1), message)

    @property
    def operations(self) -> Hashable:
        """What the first block consists of, run again; see :func:`~gradfree.torchside.graph.operations`."""
        given, first = entering(self._states[0]), {name: column[0] for name, column in self._tensors.items()}
        # As they were in the forward pass: parameters may be frozen since.
        own = {name: t.detach().requires_grad_(id(t) in self._numbers) for name, t in first.items()}
        return operations([call(self._structure, own, given)], [given, *own.values()])

    def constant(self, factor: Factor) -> list[Factor]:
        """Return the factors K_i = diag(``factor``)."""
        return [factor] * len(self)

    def residual(self, weight: float = 1.0) -> list[Factor]:
        """Return ``weight`` · K_i, the same number for all blocks but the first, whose K is zero."""
        if weight == 0.0:
            return self.constant(0.0)
        factor: Factor | None = self.declared
        if factor is None:
            inputs, _, out = self._batch
            factor = residual_factor(out, get_gradient_edge(inputs))
        first, last = self._blocks[0][0], self._blocks[-1][0]
        if isinstance(factor, Tensor):
            raise ChainError(
                f"the skip connection of the blocks from {first} on is not one number, as in x + g(x), any more: it "
                "depends on values, as a gate does. Blocks in a batch cannot have that: attach with batched=False."
            )
        if self.requires_residual and factor == 0.0 and self.declared is None:
            raise ChainError(NO_RESIDUAL.format(first=first, last=last))
        return [0.0, *[factor * weight] * (len(self) - 1)]

    def _stacked(self, cotangents: Tensor | Sequence[Cotangent]) -> Tensor:
        if isinstance(cotangents, Tensor):
            return cotangents
        stacked = self.like.new_zeros(len(self), *self.like.shape)
        for row, cotangent in zip(stacked.unbind(0), cotangents, strict=True):
            if cotangent is not None:
                row.copy_(cotangent)
        return stacked

    def scan(self, terms: Tensor | Sequence[Cotangent], factors: Sequence[Factor]) -> Tensor:  # type: ignore[override]
        """Solve δ_i = terms_i + δ_{i+1} K_{i+1}."""
        if is_number(factors[-1], 1.0) and not isinstance(terms, Tensor) and all(e is None for e in terms[:-1]):
            assert terms[-1] is not None
            return terms[-1].expand(len(self), *self.like.shape)
        return scan_along(self._stacked(terms), factors[-1])

    def sweep_factors(self, factors: Sequence[Factor], exact: int) -> Sequence[Factor]:
        """Return ``factors`` unchanged: a batch does not round exactly as single blocks do, so nothing is gained."""
        return factors

    def pull(  # type: ignore[override]
        self, direct: Sequence[Cotangent], delta: Tensor, factors: Sequence[Factor]
    ) -> Tensor:
        """Return e_i + δ_{i+1} (F_{i+1} - K_{i+1}): one call for all links."""
        inputs, _, out = self._batch
        with local_backward(self._span, ()):
            (vjps,) = torch.autograd.grad(out, inputs, delta, retain_graph=True, materialize_grads=True)
        if not is_number(factors[-1], 0.0):
            vjps = vjps - delta * factors[-1]
        terms = torch.cat([vjps[1:], vjps.new_zeros(1, *vjps.shape[1:])])
        for i, e in enumerate(direct):
            if e is not None:
                terms[i] += e
        return terms

    def gradients(self, delta: Tensor | Sequence[Cotangent]) -> ChainGradients:
        """Return δ_i ∂f_i/∂θ_i of all links, and δ_1 F_1."""
        delta, total, initial = self._stacked(delta), self.zero(), None
        if self.deltas is not None:
            self.deltas.update(zip((path for path, _ in self._blocks), delta.detach(), strict=True))
        inputs, weights, out = self._batch
        with local_backward(self._span, ()):
            entered, *gradients = torch.autograd.grad(
                out, [inputs, *weights.values()], delta, retain_graph=self.keep_graph, allow_unused=True
            )
        columns = [self._tensors[name] for name in weights]
        if not self.keep_graph:
            del self._batch, inputs, weights, out
        if self._needs_initial:
            initial = entered[0].clone()  # A view would keep the gradients of all links' inputs alive.
        for column, stacked in zip(columns, gradients, strict=True):
            if stacked is None:  # The blocks do not use it: no gradient, as in autograd.
                continue
            # contiguous(): autograd would copy each gradient whose strides differ from the parameter's.
            for p, gradient in zip(column, stacked.contiguous().unbind(0), strict=True):
                number = self._numbers[id(p)]
                total.parameters[number] = plus(total.parameters[number], gradient)
        return total._replace(initial=initial)

    def survey(self, direct: Sequence[Cotangent]) -> list[LinkFindings]:
        """Return the findings about each link, run again without the batch."""
        return [replace(link, batched=True) for link in super().survey(direct)]

    @cached_property
    def _batch(self) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The stacked inputs, trained parameters by name, and outputs of all blocks, run again with one graph."""
        given = list(self._states[:-1])
        with torch.no_grad():
            inputs = torch.stack(given).requires_grad_()
            stacked = {name: torch.stack(list(column)) for name, column in self._tensors.items()}
        trained = [name for name, column in self._tensors.items() if id(column[0]) in self._numbers]
        weights = {name: stacked[name].requires_grad_() for name in trained}
        with local_backward(self._span, ()), torch.enable_grad():
            out = vmap(partial(call, self._structure), randomness="error")(stacked, inputs)
        outs, where = out.detach(), f"the blocks from {self._span}"
        own = {id(t) for t in (inputs, *weights.values())}
        if any(id(leaf) not in own for leaf in walk([out]).leaves):
            raise ChainError(
                f"{where} use a tensor that needs a gradient and is not one of their parameters: in a batch it would "
                "get none. Register it as a parameter, or attach with batched=False."
            )
        self._check(outs[-1], self._states[-1], where)
        self._check(outs[:-1], inputs.detach()[1:], where)
        return inputs, weights, out


def entering(state: Tensor, needed: bool = True) -> Tensor:
    """Return ``state`` as a block gets it: if ``needed`` with a graph that begins there, and free to be changed."""
    with torch.enable_grad():
        return state.detach().requires_grad_(needed).view_as(state)
