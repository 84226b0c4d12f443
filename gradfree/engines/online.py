"""Engines that may learn inside a sequence: what the parameters have done to the state is carried along with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradfree.algebra.block_scan import Blocks, block_scan
from gradfree.algebra.cotangents import plus
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.report import path_name
from gradfree.chains.site import Site
from gradfree.engines.engine import Engine
from gradfree.errors import ChainError
from gradfree.time.cell_site import CellLayerSite
from gradfree.time.closed_forms import Links, State
from gradfree.time.time_chain import TimeChain


@dataclass(frozen=True, kw_only=True)
class StreamEngine(Engine):
    """An engine for chains in time whose passes may be the chunks of endless sequences, a *stream*.

    Call the layer on one chunk after the other, each time with the final state of the chunk before, detached, and run
    a backward pass for each: with a loss of zero, if there is none. What is carried is in the chain's memory and in
    checkpoints. A sequence whose initial state is another one, such as zeros, begins anew.

    Args:
        stream: whether passes continue the sequences of the passes before. If not, nothing is carried.
    """

    stream: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.stream, bool):
            raise TypeError(f"{type(self).__name__}: stream must be True or False, not {self.stream!r}.")

    @property
    def continues(self) -> bool:
        """Whether passes are the chunks of a stream."""
        return self.stream

    def solves(self, kind: type[Site]) -> bool:
        """Return whether ``kind`` is one of chains in time."""
        return kind.dimension == "time" and super().solves(kind)

    def problems_with(self, site: Site) -> Iterator[str]:
        """Yield a problem for a layer that reads a stream backwards, too."""
        yield from super().problems_with(site)
        if self.stream and getattr(site.blocks[site.path], "bidirectional", False):
            yield f"{path_name(site.path)} is bidirectional: a stream has no end to begin from. Use stream=False."

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients of this pass, with those of earlier chunks' parameters if it is one of a stream.

        Raises:
            ChainError: a stream of packed sequences, or of a :class:`CellLayer` with resets.
        """
        assert isinstance(chain, TimeChain)
        if self.stream and chain.valid is not None:
            raise ChainError(
                f"{path_name(chain.path)}: a stream needs chunks of equal length, without resets in the middle. "
                "Call the layer on tensors, not packed and not by run_with_resets, or use stream=False."
            )
        return self.chunk_gradients(chain, direct)

    @abstractmethod
    def chunk_gradients(self, chain: TimeChain, direct: State) -> ChainGradients:
        """Return the gradients."""

    def carried(self, chain: TimeChain) -> dict[str, Tensor]:
        """Return what :meth:`carry` has stored, zero for sequences that begin anew; empty outside of a stream.

        A sequence goes on if its initial state equals the last final state. The comparison does not wait for the
        device.
        """
        kept, first = chain.memory.of("stream"), chain.ends[0]
        last = kept.get(f"{chain.path} state")
        if not self.stream or last is None or last.shape != first.shape:
            return {}
        goes_on = (last.to(first) == first).flatten(1).all(1)
        own = {name: kept[f"{chain.path} {name}"].to(first) for name in self._names(chain)}
        return {name: torch.where(goes_on.view(-1, *[1] * (x.dim() - 1)), x, 0.0) for name, x in own.items()}

    def carry(self, chain: TimeChain, tensors: dict[str, Tensor]) -> None:
        """Store ``tensors``, (B, ...), and the final state, for the next chunk of the stream; drop all before."""
        if self.stream:
            kept, found = chain.memory.of("stream"), {"state": chain.ends[1], **tensors}
            for name in self._names(chain):
                del kept[f"{chain.path} {name}"]
            kept.update({f"{chain.path} {name}": x for name, x in found.items()})

    def _names(self, chain: TimeChain) -> list[str]:
        start = f"{chain.path} "
        names = (key.removeprefix(start) for key in chain.memory.of("stream") if key.startswith(start))
        return [name for name in names if name != "state"]


class InfluenceEngine(StreamEngine):
    """An engine that splits F = K + J, leaves J out, and carries the influence P = ∂h/∂θ along K.

    Inside a chunk δ_t = e_t + δ_{t+1} K_{t+1}. With P_0, the influence of the parameters on the chunk's initial state,
    the gradient is Σ δ_t ∂f_t/∂θ + δ_1 K_1 P_0, and the next chunk gets P_T = Σ D_t ∂f_t/∂θ + D_1 K_1 P_0, where D is
    the δ of h_T itself. So P_t = K_t P_{t-1} + ∂f_t/∂θ, as in real-time recurrent learning, but chunk by chunk.
    """

    @abstractmethod
    def links(self, chain: TimeChain) -> Links:
        """Return the links with K in place of F."""

    @abstractmethod
    def influences(self, chain: TimeChain) -> Influences:
        """Return how P is stored."""

    def chunk_gradients(self, chain: TimeChain, direct: State) -> ChainGradients:
        """Return the gradients of a chunk, with what earlier chunks contribute."""
        links = self.links(chain)
        delta = links.unroll(direct)
        if not self.stream:
            return chain.gradients(delta)
        stored, known = self.influences(chain), self.carried(chain)
        entering = stored.times(links.initial_cotangent(delta), known, 1)
        of_end = stored.links.unroll(stored.ends)
        own = chain.sample_gradients(of_end, sets=stored.sets)
        older = stored.times(stored.links.initial_cotangent(of_end), known, stored.sets)
        after = {str(n): _sum(g, older.get(str(n))) for n, g in enumerate(own) if g is not None}
        # A parameter that is frozen now still has its part in the state.
        self.carry(chain, {**older, **after})
        found = chain.gradients(delta)
        parameters = [
            plus(g, None if g is None or str(n) not in entering else entering[str(n)].sum((0, 1)).to(g.dtype))
            for n, g in enumerate(found.parameters)
        ]
        return found._replace(parameters=parameters)


class Influences:
    """The influence P of the parameters on the state, as tensors (B, N, *shape of a parameter).

    Attributes:
        sets: N: the components of a state or, by units, its parts.
        ends: the cotangents of h_T whose δ are the influences, part by part, (T, N · B, H); zero before the last step.
        links: the links for these N sets.
    """

    def __init__(self, chain: TimeChain, sets: int, links: Links, ends: State):
        self.chain, self.sets, self.links, self.ends = chain, sets, links, ends

    def times(self, entering: Sequence[Tensor], known: dict[str, Tensor], sets: int) -> dict[str, Tensor]:
        """Return the cotangents of h_0, ``sets`` of them, times P_0: (B, sets, *shape) by the parameter's name."""
        raise NotImplementedError


class DenseInfluences(Influences):
    """P for each component of a state: N is their number, and P takes N times the memory of the parameters."""

    def __init__(self, chain: TimeChain):
        like = chain.vectors((None,) * len(chain.states))[-1]
        batch, size = like.shape
        ends = like.new_zeros(len(chain), size, batch, size)
        ends[-1] = torch.eye(size, dtype=like.dtype, device=like.device).unsqueeze(1)
        super().__init__(chain, size, chain.repeated_links(size), chain.cotangents(ends.flatten(1, 2), ()))

    def times(self, entering: Sequence[Tensor], known: dict[str, Tensor], sets: int) -> dict[str, Tensor]:
        """Return Σ_s entering_s P_s over the components s of the state."""
        rows = torch.cat([part.flatten(1) for part in entering], -1).unflatten(0, (sets, -1))
        return {name: torch.einsum("nbs,bs...->bn...", rows.to(p), p) for name, p in known.items()}


class UnitInfluences(Influences):
    """P where K keeps units separate and each row of a weight acts on one unit: one P for each part of the state."""

    def __init__(self, chain: TimeChain, blocks: Blocks):
        sets = len(blocks)
        like = chain.states[0]
        ends = []
        for part in range(sets):
            end = like.new_zeros(len(chain), sets, *like.shape[1:])
            end[-1, part] = 1.0
            ends.append(end.flatten(1, 2))
        super().__init__(chain, sets, UnitLinks(blocks, sets), tuple(ends))

    def times(self, entering: Sequence[Tensor], known: dict[str, Tensor], sets: int) -> dict[str, Tensor]:
        """Return Σ_p entering_p P_p over the parts p of the state, unit by unit."""
        rows = torch.stack([part.unflatten(0, (sets, -1)).transpose(0, 1) for part in entering], 2)
        found = {}
        for name, p in known.items():
            own = rows.repeat(1, 1, 1, p.shape[2] // rows.shape[-1])
            own = own.view(*own.shape, *[1] * (p.dim() - 3))
            found[name] = (own * p.unsqueeze(1)).sum(2)
        return found


class UnitLinks(Links):
    """Links whose Jacobians K act on each unit by itself.

    Args:
        blocks: K unit by unit.
        sets: how many sets of cotangents there are for each sequence.
    """

    def __init__(self, blocks: Blocks, sets: int = 1):
        self.blocks = [[None if k is None else k.repeat(1, sets, 1) if sets > 1 else k for k in row] for row in blocks]

    def unroll(self, direct: State, entering: Sequence[Tensor] | None = None) -> State:
        """Return δ by a scan."""
        like = next(e for e in direct if e is not None)
        terms = [torch.zeros_like(like) if e is None else e for e in direct]
        # Transposed, as cotangents are row vectors.
        return tuple(block_scan(terms, list(zip(*self.blocks, strict=True)), reverse=True))

    def initial_cotangent(self, delta: State) -> Sequence[Tensor]:
        """Return δ_1 K_1."""
        columns = zip(*self.blocks, strict=True)
        found = ([d[0] * k[0] for d, k in zip(delta, column, strict=True) if k is not None] for column in columns)
        return [torch.stack(products).sum(0) if products else torch.zeros_like(delta[0][0]) for products in found]

    def jvp(self, tangents: Sequence[Tensor], step: int) -> Sequence[Tensor]:
        """Return K_t w."""
        rows = ([w * k[step] for w, k in zip(tangents, row, strict=True) if k is not None] for row in self.blocks)
        return [torch.stack(own).sum(0) if own else torch.zeros_like(tangents[0]) for own in rows]


class UnitEngine(InfluenceEngine):
    """An engine whose K acts on each unit by itself, so that P takes the memory of the parameters for each sequence."""

    @abstractmethod
    def blocks(self, chain: TimeChain) -> Blocks:
        """Return K unit by unit."""

    def problems_with(self, site: Site) -> Iterator[str]:
        """Yield a problem for a stream through a cell of one's own, whose weights may act on several units."""
        yield from super().problems_with(site)
        if self.stream and isinstance(site, CellLayerSite):
            yield (
                f"{path_name(site.path)} is a CellLayer: {type(self).__name__} can carry a stream through torch's "
                "layers only. Use the engine 'rtrl', or stream=False."
            )

    def links(self, chain: TimeChain) -> UnitLinks:
        """Return the links by units."""
        return UnitLinks(self.blocks(chain))

    def influences(self, chain: TimeChain) -> UnitInfluences:
        """Return P by units."""
        return UnitInfluences(chain, self.blocks(chain))


def _sum(a: Tensor, b: Tensor | None) -> Tensor:
    return a if b is None else a + b
