"""Which rank holds which blocks of a chain, and which of the weights around it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, nn

from gradfree.chains.site import Site
from gradfree.errors import ChainError


@dataclass(frozen=True)
class Placement:
    """What lies where.

    Attributes:
        blocks: module paths of the chain's blocks.
        runs: for each rank, which of them it holds.
        holders: of each parameter and buffer of the model, by name, the ranks that hold it.
        names: the names of each parameter that has several, the first one for all of them.
    """

    blocks: Sequence[str]
    runs: Sequence[range]
    holders: Mapping[str, Sequence[int]]
    names: Mapping[str, str]

    @property
    def shared(self) -> dict[str, Sequence[int]]:
        """The parameters that several ranks hold, by their first names, with these ranks."""
        return {name: self.holders[name] for name in self.names.values() if len(self.holders[name]) > 1}

    def in_blocks(self, name: str) -> bool:
        """Tell whether a parameter or buffer of this name belongs to a block."""
        return any(name.startswith(f"{path}.") for path in self.blocks)


def place(
    model: nn.Module,
    site: Site,
    count: int,
    costs: Sequence[float] | None,
    first: Sequence[str],
    last: Sequence[str],
    starts: Sequence[int] | None = None,
) -> Placement:
    """Return a placement of ``model`` on ``count`` ranks.

    Args:
        model: the model.
        site: its chain.
        count: the number of ranks.
        costs: of each block; ``None``: its number of parameters.
        first: paths of modules and parameters outside the chain that the first rank holds.
        last: likewise of the last rank. By default what comes before the chain's blocks in ``model.named_modules()``
            lies on the first, all else on the last.
        starts: the indices of blocks that a run may begin with, 0 first; ``None``: any.

    Raises:
        ChainError: fewer blocks than ranks, costs or paths that do not fit.
    """
    blocks = list(site.blocks)
    starts = range(len(blocks)) if starts is None else starts
    if len(starts) < count:
        raise ChainError(f"{site.path!r} has {len(starts)} blocks, too few for {count} ranks: one each at least.")
    if len(set(map(id, site.blocks.values()))) < len(blocks):
        raise ChainError(f"{site.path!r} runs a block more than once: across ranks each block has its own place.")
    if costs is None:
        costs = [max(1, sum(p.numel() for p in block.parameters())) for block in site.blocks.values()]
    if len(costs) != len(blocks) or min(costs) <= 0:
        raise ChainError(f"costs must be {len(blocks)} positive numbers, one for each block of {site.path!r}.")
    ends = [*starts[1:], len(blocks)]
    together = balanced([sum(costs[start:end]) for start, end in zip(starts, ends, strict=True)], count)
    runs = [range(starts[run.start], ends[run.stop - 1]) for run in together]
    tensors = dict(_tensors(model))
    for path in (*first, *last):
        if not any(_within(name, [path]) for name in tensors):
            raise ChainError(f"the model has no weights at {path!r}, which first or last names.")
    rank_of = {path: rank for rank, run in enumerate(runs) for path in blocks[run.start : run.stop]}
    order = {path: n for n, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    start = min(order[path] for path in blocks)
    found: dict[int, list[str]] = {}
    ranks: dict[int, set[int]] = {}
    for name, tensor in tensors.items():
        block = next((path for path in blocks if name.startswith(f"{path}.")), None)
        before = order[name.rpartition(".")[0]] < start
        outside = 0 if _within(name, first) or (before and not _within(name, last)) else count - 1
        found.setdefault(id(tensor), []).append(name)
        ranks.setdefault(id(tensor), set()).add(outside if block is None else rank_of[block])
    holders = {name: sorted(ranks[id(tensor)]) for name, tensor in tensors.items()}
    names = {name: found[id(tensor)][0] for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    placement = Placement(blocks, runs, holders, names)
    for name in placement.shared:
        kinds = {placement.in_blocks(other) for other in found[id(tensors[name])]}
        if len(kinds) > 1:
            raise ChainError(f"{name} is a weight of a block and of what lies around the chain, on several ranks.")
    return placement


def balanced(costs: Sequence[float], count: int) -> list[range]:
    """Return consecutive runs of items, the dearest of which is as cheap as can be; of equal ones the first are longer.

    Args:
        costs: of each item, positive; at least ``count``.
        count: of runs.
    """
    sums = [0.0, *accumulate(map(float, costs))]

    def furthest(start: int, limit: float) -> int:
        return bisect_right(sums, sums[start] + limit) - 1

    def fits(start: int, runs: int, limit: float) -> bool:
        for _ in range(runs):
            start = max(start, furthest(start, limit))
        return start == len(costs)

    # Every limit that matters is the cost of some run; doubles are told apart far beyond what costs mean.
    low, high = max(costs), sums[-1]
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(0, count, middle) else (middle, high)
    limit = high * (1 + 1e-9)
    runs, start = [], 0
    for left in range(count, 0, -1):
        share = sums[start] + (sums[-1] - sums[start]) / left
        most = min(furthest(start, limit), len(costs) - left + 1)
        stop = min(most, max(start + 1, bisect_left(sums, share * (1 - 1e-9), start)))
        if not fits(stop, left - 1, limit):
            stop = most
        runs.append(range(start, stop))
        start = stop
    return runs


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by all their names, in the order of ``state_dict``."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def _within(name: str, paths: Sequence[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)
