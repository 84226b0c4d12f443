"""Detects blocks whose gradients come from autograd although an engine is attached to them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gradfree.chains.report import path_name
from gradfree.chains.site import Site


def unsolved(site: Site) -> dict[str, nn.Module]:
    """Return the blocks of ``site`` that the engine has never solved, under any of their paths."""
    solved = {site.blocks[path] for path in site.solved if path in site.blocks}
    return {path: block for path, block in site.blocks.items() if block not in solved}


def bypass_message(site: Site, has_gradient: Callable[[nn.Parameter], bool]) -> str | None:
    """Return the warning that blocks of ``site`` have autograd's gradients; ``None`` if there are none.

    That is so if the model bypasses the engine, or if each block is a chain of its own.

    Args:
        site: the chain.
        has_gradient: returns whether a parameter has a gradient.
    """
    paths = []
    for path, block in unsolved(site).items():
        own = [p for p in block.parameters() if p.requires_grad]
        # A block that did not run (LayerDrop) may still share a weight or two with the loss, so all must have one.
        if own and all(map(has_gradient, own)):
            paths.append(path)
    if not paths:
        return _separate_message(site)
    which = f"{len(paths)} of its {len(site.blocks)} blocks ({paths[0]}, ...)" if len(paths) > 1 else f"{paths[0]!r}"
    begins = (
        f"the engine on {path_name(site.path)} has never run for {which}, but their parameters have gradients from "
        "autograd. "
    )
    if paths[0] in site.splits:
        return f"{begins}Of {paths[0]!r}: {site.splits[paths[0]]}. Or leave the chain out, chains=[...]."
    return (
        f"{begins}The model bypasses the engine: it runs layers of a block by themselves, or a forward without hooks. "
        "Call block(x), or leave the chain out, chains=[...]. Ignore this for a loss on weights only (a penalty)."
    )


def _separate_message(site: Site) -> str | None:
    """Return the warning that each block of ``site`` is a separate chain; ``None`` if some are not."""
    if site.joined or len(site.blocks) < 2 or len(site.blocks.keys() - site.splits.keys()) > 1:
        return None
    return (
        f"the engine on {path_name(site.path)} has no effect: each block is a separate chain, so the gradients are "
        f"autograd's. Of the last block: {[*site.splits.values()][-1]}. Put what the model computes between blocks "
        "into them, or name other chains=[...]."
    )
