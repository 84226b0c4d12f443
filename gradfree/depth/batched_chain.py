"""Chains in depth whose blocks ran without a graph: alike ones are linearised, and pulled through, in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradfree.algebra import time_scan
from gradfree.algebra.cotangents import Cotangent, Factor, is_number
from gradfree.batched.batch import Autocast, Bare, Batch, matches
from gradfree.batched.stacks import Stack, Stacks
from gradfree.chains.chain import ChainGradients
from gradfree.chains.survey import LinkFindings
from gradfree.depth.borders import edge
from gradfree.depth.chain import DepthChain, Trained, residual_of
from gradfree.depth.link import Link, walking
from gradfree.errors import ChainError
from gradfree.torchside.graph import may_write, walk
from gradfree.torchside.phases import phase


class Ran(NamedTuple):
    """A block's part of a forward pass without a graph.

    Attributes:
        path: the block's module path.
        block: the block.
        out: its output.
        x: what it was given.
        tensors: its parameters and buffers in the pass.
        residual: what its residual path is known to carry.
        changed: whether its output has been changed in place behind the chain.
        root: as a :class:`Link` has it, of which there is nothing here.
        aside: likewise.
        in_place: likewise.
        aliased: likewise.
    """

    path: str
    block: nn.Module
    out: Tensor
    x: Tensor
    tensors: Sequence[Tensor] = ()
    residual: float = 0.0
    changed: bool = False
    root: None = None
    aside: tuple[Tensor, ...] = ()
    in_place: bool = False
    aliased: bool = False


class Group:
    """Links of a chain whose blocks are alike.

    Args:
        links: their parts of the pass.
        indices: their places in the chain.
        names: of the tensors of each, and whether these were trained in the pass.
        autocast: as in the pass.
        columns: what the pass has stacked of them, by name; of that the ``rows`` are theirs.
    """

    def __init__(
        self,
        links: Sequence[Ran],
        indices: Sequence[int],
        names: Mapping[str, bool],
        autocast: Autocast,
        columns: Mapping[str, Stack],
        rows: Sequence[int],
    ):
        self.links, self.indices, self.autocast, self.columns, self._rows = links, indices, autocast, columns, rows
        self._names = names
        self.tensors = dict(zip(names, zip(*(link.tensors for link in links), strict=True), strict=True))
        self.at, self.rows = _places(indices), _places(rows)
        self._batch: Batch | None = None

    def tensors_of(self, index: int) -> dict[str, Tensor]:
        """Return those of the link at ``index`` of the chain, by name."""
        return dict(zip(self.tensors, self.links[list(self.indices).index(index)].tensors, strict=True))

    def batch(self) -> Batch:
        """Return the group's linearisation, made when it is first asked for."""
        if self._batch is None:
            with walking(self.links[::-1], ()):
                inputs = torch.stack([link.x for link in self.links])
                stacked = {name: column.stacked[self.rows] for name, column in self.columns.items()}
                self._batch = Batch(self.links[0].block, self.tensors, self._names, inputs, self.autocast, stacked)
                self._hold_to_the_pass(self._batch)
        return self._batch

    def _hold_to_the_pass(self, batch: Batch) -> None:
        """Refuse a batch whose outputs are not those of the forward pass.

        Whatever else the blocks read, a global, a file, another module's attribute, may have changed since the pass
        that showed that they can be batched. A GPU is not waited for: there it is an assertion of the device's.
        """
        outs, found = self.outputs(), batch.out.detach()[self.as_it_was]
        _hold(found, outs, self.autocast, f"the blocks from {self.links[0].path} to {self.links[-1].path}")

    @cached_property
    def as_it_was(self) -> slice | list[int]:
        """Which of the links' outputs are what they have returned."""
        return _places([n for n, link in enumerate(self.links) if not link.changed])

    def outputs(self) -> Tensor:
        """Return those of the links' outputs."""
        kept = [link.out for link in self.links if not link.changed]
        return torch.stack(kept) if kept else self.links[0].out.new_empty(0, *self.links[0].out.shape)

    def pull(self, delta: Tensor) -> Tensor | None:
        """Return what the links' cotangents, of all of the chain's, bring to the states before them."""
        return self.pull_rows(delta[self.at])

    def pull_rows(self, delta: Tensor) -> Tensor | None:
        """Return what the links' own cotangents bring to the states before them."""
        batch = self.batch()
        with walking(self.links[::-1], ()):
            return batch.pull(delta)

    def part(self, indices: Sequence[int]) -> Group:
        """Return the group of the links at ``indices``."""
        places = [list(self.indices).index(i) for i in indices]
        links, rows = [self.links[n] for n in places], [self._rows[n] for n in places]
        return Group(links, indices, self._names, self.autocast, self.columns, rows)

    def gradients(self, delta: Tensor, of_inputs: bool) -> tuple[dict[str, Tensor | None], Tensor | None]:
        """Return what they bring to the parameters, stacked, by name, and to the states before, if asked for.

        Frees the linearisation.
        """
        batch, self._batch = self.batch(), None
        with walking(self.links[::-1], ()):
            return batch.gradients(delta[self.at], False, of_inputs)


class BatchedChain(DepthChain):
    """Links of which some ran without a graph. Cotangents are one tensor (L, ...), states all of one shape.

    Args:
        chain: the links, in the order of the forward pass; without a graph where one of ``groups`` has them.
        groups: the links that ran without a graph.
        numbers: of the chain's parameters, by their identity.
        initial: whether the state before the chain needs a gradient.
        columns: what the pass has stacked: the chain's parameters, then, which have no ``numbers``.
    """

    def __init__(
        self,
        chain: DepthChain,
        groups: Sequence[Group],
        numbers: dict[int, int],
        initial: bool,
        columns: Stacks | None,
    ):
        keep, memory, mixing, declared = chain.keep_graph, chain.memory, chain.mixing, chain.declared
        super().__init__(chain.links, chain.parameters, chain.inputs, keep, memory, mixing, declared, chain.alone)
        self.groups, self.numbers, self.initial, self.columns = groups, numbers, initial, columns
        self._ran = {i: (link, group) for group in groups for i, link in zip(group.indices, group.links, strict=True)}

    @cached_property
    def with_graphs(self) -> DepthChain:
        """The same chain, its blocks run again one by one."""
        parameters, numbers = self.parameters, self.numbers
        if self.columns is not None:
            parameters, numbers = Trained.of(p for rows in self.columns.rows for p in rows)
        links = [self._run_again(i, numbers) if i in self._ran else link for i, link in enumerate(self.links)]
        keep, declared, alone = self.keep_graph, self.declared, self.alone
        chain = DepthChain(links, parameters, self.inputs, keep, self.memory, self.mixing, declared, alone)
        return chain if self.columns is None else _Unstacked(chain, self.columns)

    def _run_again(self, index: int, numbers: Mapping[int, int]) -> Link:
        ran, group = self._ran[index]
        device, dtype, enabled = group.autocast
        x = ran.x.detach().requires_grad_(self.initial or index > 0)
        with torch.enable_grad(), torch.autocast(device, dtype, enabled, cache_enabled=False):
            given = x.view_as(x)
            tensors = {f"module.{name}": tensor for name, tensor in group.tensors_of(index).items()}
            out = functional_call(Bare(ran.block), tensors, (given,))
        if not ran.changed:
            _hold(out.detach(), ran.out, group.autocast, ran.path)
        entry = edge(given) if x.requires_grad else None
        graph = walk([out], () if entry is None else (entry.node,))
        parameters = {numbers[id(leaf)]: leaf for leaf in graph.leaves if id(leaf) in numbers}
        entry = entry if graph.stops else None
        return Link(ran.path, ran.block, out, entry, (), parameters, out.grad_fn, may_write(graph.kinds))

    def constant(self, factor: Factor) -> list[Factor]:
        """Return the factors K_i = diag(``factor``)."""
        return [factor] * len(self)

    def _residuals(self) -> list[Factor]:
        links = [self._ran[i][0] if i in self._ran else link for i, link in enumerate(self.links)]
        factors: list[Factor] = []
        for before, link, ran in zip([None, *self.links[:-1]], self.links, links, strict=True):
            if isinstance(ran, Link):
                factors.append(residual_of(None if before is None else before.out.shape, link, self.declared))
            else:
                known = ran.residual if self.declared is None else self.declared
                factors.append(0.0 if before is None else known)
        return factors

    def _stacked(self, cotangents: Tensor | Sequence[Cotangent]) -> Tensor:
        if isinstance(cotangents, Tensor):
            return cotangents
        stacked = self.like.new_zeros(len(self), *self.like.shape)
        for row, cotangent in zip(stacked.unbind(0), cotangents, strict=True):
            if cotangent is not None:
                row.copy_(cotangent)
        return stacked

    @phase("scan")
    def scan(self, terms: Tensor | Sequence[Cotangent], factors: Sequence[Factor]) -> Tensor:  # type: ignore[override]
        """Solve δ_i = terms_i + δ_{i+1} K_{i+1}."""
        carries = factors[1:]
        if all(is_number(f, 1.0) for f in carries) and isinstance(terms, list) and all(e is None for e in terms[:-1]):
            return terms[-1].expand(len(self), *self.like.shape)
        terms = self._stacked(terms)
        one = next(iter(carries), 0.0)
        if not isinstance(one, Tensor) and all(is_number(f, one) for f in carries):
            return time_scan.scan(terms, terms.new_full((), one), reverse=True) if one else terms
        delta = terms.clone()
        rows = delta.unbind(0)
        for i in range(len(rows) - 2, -1, -1):
            factor = factors[i + 1]
            if isinstance(factor, Tensor):
                rows[i].add_(rows[i + 1] * factor)
            else:
                rows[i].add_(rows[i + 1], alpha=factor)
        return delta

    def beyond(self, factors: Sequence[Factor], exact: int) -> Sequence[Factor]:
        """Return ``factors``: batches round otherwise than single blocks."""
        return factors

    @phase("pulls")
    def pull(  # type: ignore[override]
        self, direct: Sequence[Cotangent], delta: Tensor, factors: Sequence[Factor]
    ) -> Tensor:
        """Return e_i + δ_{i+1} (F_{i+1} - K_{i+1}): one call for each group, one for all links with graphs."""
        pulled = self._pulled(delta)
        carries = factors[1:]
        if all(is_number(f, 1.0) for f in carries):
            pulled = pulled - delta
        elif not all(is_number(f, 0.0) for f in carries):
            known = [d * f for d, f in zip(delta[1:].unbind(0), carries, strict=True)]
            pulled[1:] -= torch.stack(known)
        terms = torch.cat([pulled[1:], pulled.new_zeros(1, *pulled.shape[1:])])
        for i, e in enumerate(direct):
            if e is not None:
                terms[i] += e
        return terms

    def survey(self, direct: Sequence[Cotangent]) -> list[LinkFindings]:
        """Return what each link carries, run again by itself."""
        found = self.with_graphs.survey(direct)
        return [replace(link, batched=i in self._ran) for i, link in enumerate(found)]

    def in_step(self, ends: Sequence[int]) -> BatchedChain:
        """Return the chain with its groups cut by how far their links are from the ends of their segments."""
        distance = {i: min(end - i for end in ends if end >= i) for i in range(len(self))}
        groups = []
        for group in self.groups:
            parts: dict[int, list[int]] = {}
            for i in group.indices:
                parts.setdefault(distance[i], []).append(i)
            groups += [group.part(indices) for indices in parts.values()]
        return BatchedChain(self, groups, self.numbers, self.initial, self.columns)

    def carried(self, indices: Sequence[int], delta: Sequence[Cotangent]) -> list[Cotangent]:
        """Return δ_i F_i of the links ``indices``: one call for each group of :meth:`in_step`."""
        given = {i: d for i, d in zip(indices, delta, strict=True) if d is not None}
        found: dict[int, Cotangent] = {}
        for group in self.groups:
            if not given.keys().isdisjoint(group.indices):
                pulled = group.pull_rows(
                    torch.stack([given.get(i, torch.zeros_like(self.like)) for i in group.indices])
                )
                found.update(zip(group.indices, () if pulled is None else pulled.unbind(0), strict=False))
        own = [i for i in given if i not in self._ran]
        found.update(zip(own, super().carried(own, [given[i] for i in own]), strict=True))
        return [found.get(i) if i in given else None for i in indices]

    def _pulled(self, delta: Tensor) -> Tensor:
        """Return δ_i F_i of all links but, perhaps, the first."""
        if len(self.groups) == 1 and len(self.groups[0].indices) == len(self):
            pulled = self.groups[0].pull(delta)
            return torch.zeros_like(delta) if pulled is None else pulled
        result = torch.zeros_like(delta)
        for group in self.groups:
            pulled = group.pull(delta)
            if pulled is not None:
                result[group.at] = pulled
        live = [i for i in reversed(range(1, len(self))) if i not in self._ran and self.links[i].state is not None]
        for i, v in zip(live, self._pull_links(live, [delta[i] for i in live]), strict=True):
            if v is not None:
                result[i] = v
        return result

    @phase("parameter gradients")
    def gradients(self, delta: Tensor | Sequence[Cotangent]) -> ChainGradients:
        """Return δ_i ∂f_i/∂θ_i of all links, and δ_1 F_1."""
        delta = self._stacked(delta)
        total, initial = self._zero(), None
        for group in self.groups:
            first = self.initial and 0 in group.indices
            found, entered = group.gradients(delta, first)
            if first and entered is not None:
                # A view would keep the gradients of all links' inputs.
                initial = entered[group.indices.index(0)].clone()
            for name, stacked in found.items():
                # Autograd copies a gradient whose strides are not the parameter's, each by itself.
                if stacked is not None and name in group.columns:
                    self._hand_back_rows(group, group.columns[name], stacked.contiguous(), total)
                elif stacked is not None:
                    self._hand_back(group.tensors[name], stacked.contiguous(), total)
        own = [i for i in reversed(range(len(self))) if i not in self._ran]
        carried = self._add_local([self.links[i] for i in own], [delta[i] for i in own], total) if own else None
        return total._replace(initial=initial if 0 in self._ran else carried)

    def _hand_back_rows(self, group: Group, column: Stack, gradient: Tensor, total: ChainGradients) -> None:
        known = total.parameters[column.number]
        if known is None and gradient.shape == column.stacked.shape:
            total.parameters[column.number] = gradient
            return
        whole = torch.zeros_like(column.stacked) if known is None else known
        whole[group.rows] = gradient
        total.parameters[column.number] = whole

    def _hand_back(self, parameters: Sequence[Tensor], stacked: Tensor, total: ChainGradients) -> None:
        numbers, gradients = map(self.numbers.get, map(id, parameters)), total.parameters
        # Autograd passes over parameters that have been frozen since the forward pass.
        needed = [parameter.requires_grad for parameter in parameters]
        for n, need, gradient in zip(numbers, needed, stacked.unbind(0), strict=True):
            if n is not None and need:
                before = gradients[n]
                gradients[n] = gradient if before is None else before + gradient

    def backpropagate(self, direct: Sequence[Cotangent]) -> ChainGradients:
        """Return the exact gradients, each block run again."""
        return self.with_graphs.backpropagate(direct)


class _Unstacked(DepthChain):
    """A chain whose parameters the pass has stacked, of links that have them one by one.

    Args:
        chain: of these links.
        columns: the stacks.
    """

    def __init__(self, chain: DepthChain, columns: Stacks):
        keep, memory, mixing, declared = chain.keep_graph, chain.memory, chain.mixing, chain.declared
        super().__init__(chain.links, chain.parameters, chain.inputs, keep, memory, mixing, declared, chain.alone)
        self._columns = columns

    def backpropagate(self, direct: Sequence[Cotangent]) -> ChainGradients:
        """Return the exact gradients."""
        return self._stacked(super().backpropagate(direct))

    def gradients(self, delta: Sequence[Cotangent]) -> ChainGradients:
        """Return δ_i ∂f_i/∂θ_i of all links, and δ_1 F_1."""
        return self._stacked(super().gradients(delta))

    def _stacked(self, found: ChainGradients) -> ChainGradients:
        given = {id(p): g for p, g in zip(self.parameters, found.parameters, strict=True)}
        return found._replace(parameters=self._columns.gradients(given))


def _hold(found: Tensor, outs: Tensor, autocast: Autocast, where: str) -> None:
    """Refuse that ``where`` has other outputs, run again, than in the pass; a GPU is not waited for."""
    problem = (
        f"{where} gave other outputs in the forward pass than run again, in a batch or one by one: something that they "
        "read has changed since, or they are no longer alike. Attach with batched=False."
    )
    try:
        torch._assert_async(matches(found, outs, autocast[1] if autocast[2] else outs.dtype), problem)
    except RuntimeError:
        raise ChainError(problem) from None


def _places(indices: Sequence[int]) -> slice | list[int]:
    """Return what picks ``indices``, a slice where it can be."""
    if not indices:
        return []
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    even = list(range(indices[0], indices[-1] + 1, step)) == list(indices)
    return slice(indices[0], indices[-1] + 1, step) if even else list(indices)
