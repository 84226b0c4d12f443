"""Placement: which rank holds which blocks of a chain, and which weights around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from torch import nn

from gradfree.chains.site import Site
from gradfree.errors import SHARED_WEIGHT, ChainError
from gradfree.ranks.traced_use import traced_use
from gradfree.torchside.structure import tensors_of


@dataclass(frozen=True)
class Placement:
    """The parts of a model on each rank.

    Attributes:
        blocks: module paths of the chain's blocks.
        runs: for each rank, the indices of its blocks.
        home: the rank that holds each parameter and buffer of the model, by name.
    """

    blocks: Sequence[str]
    runs: Sequence[range]
    home: dict[str, int]


def place(model: nn.Module, site: Site, count: int, costs: Sequence[float] | None) -> Placement:
    """Return a placement of ``model`` on ``count`` ranks.

    The first rank holds what the model's ``forward`` uses before the blocks, the last rank what it uses behind them. If
    ``forward`` cannot be traced, the first rank holds what is registered before the blocks.

    Args:
        model: the model.
        site: its chain.
        count: the number of ranks.
        costs: of each block; by default its number of parameters.

    Raises:
        ChainError: fewer blocks than ranks, wrong costs, or a weight that several ranks would hold.
    """
    blocks = list(site.blocks)
    if len(blocks) < count:
        raise ChainError(f"{site.path!r} has {len(blocks)} blocks, too few for {count} ranks: each needs one at least.")
    if len(set(map(id, site.blocks.values()))) < len(blocks):
        raise ChainError(f"{site.path!r} runs a block more than once: across ranks each block may run once.")
    if costs is None:
        costs = [max(1, sum(p.numel() for p in block.parameters())) for block in site.blocks.values()]
    if len(costs) != len(blocks) or min(costs) <= 0:
        raise ChainError(f"costs must be {len(blocks)} positive numbers, one for each block of {site.path!r}.")
    runs = balanced(costs, count)
    rank_of = {path: rank for rank, run in enumerate(runs) for path in blocks[run.start : run.stop]}
    order = {path: n for n, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    start = min(order[path] for path in blocks)
    before, behind = traced_use(model, blocks)
    names: dict[int, str] = {}
    home: dict[str, int] = {}
    for name, tensor in tensors_of(model).items():
        block = next((path for path in blocks if name.startswith(f"{path}.")), None)
        first, last = _contains(before, name), _contains(behind, name)
        outside = 0 if (first if first != last else order[name.rpartition(".")[0]] < start) else count - 1
        rank, same = outside if block is None else rank_of[block], names.setdefault(id(tensor), name)
        home[name] = home.get(same, rank)
        if home[name] != rank:
            raise SHARED_WEIGHT.error(first=same, second=name)
    return Placement(blocks, runs, home)


def balanced(costs: Sequence[float], count: int) -> list[range]:
    """Split items into consecutive runs with the smallest largest cost; of equal splits, prefer long first runs.

    Args:
        costs: of each item, positive; at least ``count`` items.
        count: the number of runs.
    """
    sums = [0.0, *accumulate(map(float, costs))]

    @cache
    def best(start: int, runs: int) -> tuple[float, float, list[int]]:
        """Return the largest cost of a run, the sum of squared costs (smaller if even), and the ends of the runs."""
        if runs == 1:
            return sums[-1] - sums[start], (sums[-1] - sums[start]) ** 2, [len(costs)]
        found = []
        for stop in range(start + 1, len(costs) - runs + 2):
            cost = sums[stop] - sums[start]
            largest, squares, ends = best(stop, runs - 1)
            found.append((max(cost, largest), cost**2 + squares, [stop, *ends]))
        return min(found, key=lambda split: (split[0], split[1], -split[2][0]))

    ends = [0, *best(0, count)[2]]
    return [range(start, stop) for start, stop in pairwise(ends)]


def _contains(paths: Iterable[str], name: str) -> bool:
    """Return whether ``name`` is one of ``paths``, or the name of a tensor inside of one."""
    return any(f"{name}.".startswith(f"{path}.") for path in paths)
