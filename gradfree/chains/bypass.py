"""Detects blocks whose gradients come from autograd although an engine is attached to them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from gradfree.chains.site import Site


def bypassed(site: Site, has_gradient: Callable[[nn.Parameter], bool]) -> list[str]:
    """Return the paths of the blocks of ``site`` that have gradients, but not from the engine.

    Args:
        site: the chain.
        has_gradient: returns whether a parameter has a gradient.
    """
    found = []
    for path, block in _unsolved(site).items():
        own = [p for p in block.parameters() if p.requires_grad]
        # A block that did not run (LayerDrop) may still share a weight or two with the loss, so all must have one.
        if own and all(map(has_gradient, own)):
            found.append(path)
    return found


def _unsolved(site: Site) -> dict[str, nn.Module]:
    """Return the blocks that the engine has never solved, under any of their paths."""
    solved = {site.blocks[path] for path in site.solved if path in site.blocks}
    return {path: block for path, block in site.blocks.items() if block not in solved}


def bypass_message(site: Site, paths: Sequence[str]) -> str:
    """Return the warning: which blocks of ``site`` bypass the engine, and what to do."""
    which = f"{len(paths)} of its {len(site.blocks)} blocks ({paths[0]}, ...)" if len(paths) > 1 else f"{paths[0]!r}"
    return (
        f"the engine on {site.path!r} has never run for {which}, but their parameters have gradients from autograd. "
        "The model bypasses the engine: it runs layers of a block by themselves, or a forward without hooks; "
        f"handle.chains[{site.path!r}].splits may say why. Call block(x), or leave the chain out, chains=[...]. Ignore "
        "this for a loss on weights only (a penalty)."
    )


class BypassWatch:
    """Warns once if gradients bypass an attached engine.

    Args:
        chains: the engine's chains, by path.
    """

    def __init__(self, chains: Mapping[str, Site]):
        self._chains = list(chains.values())
        blocks = (block for site in self._chains for block in site.blocks.values())
        grads = ((p, p.grad) for block in blocks for p in block.parameters())
        self._before = {id(p): weakref.ref(grad) for p, grad in grads if grad is not None}

    def check(self) -> None:
        """Warn if a chain has gradients that bypass the engine; fully solved chains are not checked again."""
        self._chains = [site for site in self._chains if _unsolved(site)]
        for site in self._chains:
            if paths := bypassed(site, self._has_new):
                self._chains = []
                warnings.warn(bypass_message(site, paths), stacklevel=3)

    def _has_new(self, parameter: Tensor) -> bool:
        before = self._before.get(id(parameter))
        return parameter.grad is not None and (before is None or before() is not parameter.grad)
