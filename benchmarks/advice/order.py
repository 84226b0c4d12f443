"""Which rows a contest tries, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from torch import Tensor, nn

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.sweeps.sweep import row
from gradfree.chains.report import Report
from gradfree.registry import engine_class
from gradfree.scans.narrow import WIDEST_ROW
from gradfree.time.cell_layer import CellLayer

_SAME = {"dsf feedback=gate": "highway_bp k=0", "truncated window=2": "fixed_point k=1"}
"""Rows with the same gradients as another row, by label: they are not tried if the other one is."""
_MANY_STEPS, _MANY_BLOCKS = 500, 16
"""Sizes from which an engine that runs steps or blocks at once promises more than all others."""


def rows_to_try(
    model: nn.Module, chains: Sequence[str] | None, engines: Sequence[str], inputs: Any = ()
) -> tuple[dict[str, Report], list[Row]]:
    """Return the report of each engine on ``model``, and the rows of those that can be attached.

    The rows come in order of promise. First is the engine that the sizes favor: on long sequences ``shooting``, or
    ``newton`` if there is a cell layer of at most eight units; in a chain of many equal blocks ``highway_bp``. Then
    come exact engines, engines with several settings, and the others. Within a group, the first settings of all engines
    come before any second settings.

    Args:
        model: the user's model.
        chains: module paths of the chains; found automatically if not given.
        engines: names of the engines.
        inputs: the model's inputs in a batch.
    """
    created = {name: engine_class(name)() for name in engines}
    reports = {name: engine.validate(model, chains) for name, engine in created.items()}
    allowed = {
        name: report
        for name, report in reports.items()
        if report.ok and report.chains and created[name].may_gain(report)
    }
    favored = _favored(allowed, inputs)
    found: list[tuple[tuple[int, int, int], Row]] = []
    for name in allowed:
        settings = engine_class(name).worth_trying
        group = 0 if is_exact(name) else 1 if len(settings) > 1 else 2
        for n, candidate in enumerate(row(name, given) for given in settings):
            if candidate.create_engine().validate(model, chains).ok:
                found.append(((0 if n else -favored.get(name, 0), group, n), candidate))
    ordered = [candidate for _, candidate in sorted(found, key=lambda known: known[0])]
    labels = {candidate.label for candidate in ordered}
    return reports, [candidate for candidate in ordered if _SAME.get(candidate.label) not in labels]


def is_exact(engine: str) -> bool:
    """Return whether an engine has autograd's gradient, to its tolerance if it has one."""
    return bool(engine_class(engine).exact_ones())


def _favored(reports: Mapping[str, Report], inputs: Any) -> dict[str, int]:
    """Return the engines that the sizes favor, each with the number of links that it can run at once."""
    sites = [site for report in reports.values() for site in report.chains.values()]
    # How many steps a layer runs is known in a pass only; a sequence of that length enters most models.
    steps = _longest_side(inputs) if any(site.dimension == "time" for site in sites) else 0
    blocks = max((_most_alike(list(s.blocks.values())) for s in sites if s.dimension == "depth"), default=0)
    cells = [block.cell for site in sites for block in site.blocks.values() if isinstance(block, CellLayer)]
    narrow = any(getattr(cell, "hidden_size", inf) <= WIDEST_ROW for cell in cells)
    in_time = "newton" if narrow else "shooting"
    favored = {in_time: steps if steps >= _MANY_STEPS else 0, "highway_bp": blocks if blocks >= _MANY_BLOCKS else 0}
    return {name: count for name, count in favored.items() if count}


def _longest_side(inputs: Any) -> int:
    """Return the largest size of a tensor among the inputs."""
    given = inputs.values() if isinstance(inputs, Mapping) else inputs
    return max((side for x in given if isinstance(x, Tensor) for side in x.shape), default=0)


def _most_alike(blocks: Sequence[nn.Module]) -> int:
    """Return the largest number of blocks of one class and with parameters of the same shapes."""
    alike = Counter((type(block), *(p.shape for p in block.parameters())) for block in blocks)
    return max(alike.values(), default=0)
