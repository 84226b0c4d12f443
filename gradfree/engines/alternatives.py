"""Which engines take the chains of a model that another engine takes none of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from gradfree.chains.kinds import known_kinds
from gradfree.chains.site import Site
from gradfree.engines.discovery import Chains, validate

ALTERNATIVES: Mapping[str, Sequence[str]] = {
    "depth": ("fixed_point", "truncated"),
    "time": ("backprop", "fixed_point", "truncated"),
}
"""By dimension, engines that refuse no chain of the conformance suite in the first pass."""


def alternatives(model: nn.Module, chains: Chains | None, kinds: Sequence[type[Site]]) -> Iterator[str]:
    """Yield which engines to take for chains that ``model`` has, but for those of ``kinds``.

    Args:
        model: any module.
        chains: as in :meth:`gradfree.Engine.validate`.
        kinds: what the engine that is refused solves.
    """
    for dimension, names in ALTERNATIVES.items():
        others = [k for k in known_kinds() if k.dimension == dimension and not k.of_layers and k not in kinds]
        found = validate(model, chains, others) if others else None
        if found is not None and found.ok and found.chains:
            *first, last = map(repr, names)
            yield f"for {', '.join(map(repr, found.chains))} there are the engines {', '.join(first)} and {last}."
