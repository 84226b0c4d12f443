"""Noticing gradients that bypass an engine: its gradients are autograd's own, and nothing else would show it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from gradfree.chains.site import Site


def bypassed(site: Site, has_gradient: Callable[[nn.Parameter], bool]) -> list[str]:
    """Return the paths of the blocks of ``site`` that the engine has not solved, but that have got gradients.

    Args:
        site: the chain.
        has_gradient: returns whether a parameter has got one.
    """
    found = []
    for path, block in _unsolved(site).items():
        own = [p for p in block.parameters() if p.requires_grad]
        # A block that is skipped (LayerDrop), or not run at all, may still share a weight or two with the loss.
        if own and all(map(has_gradient, own)):
            found.append(path)
    return found


def _unsolved(site: Site) -> dict[str, nn.Module]:
    """Return the blocks that the engine has not solved in any of their places."""
    solved = {site.blocks[path] for path in site.solved if path in site.blocks}
    return {path: block for path, block in site.blocks.items() if block not in solved}


def bypass_message(site: Site, paths: Sequence[str]) -> str:
    """Say which blocks of ``site`` the model bypasses, and what to do."""
    which = f"{len(paths)} of its {len(site.blocks)} blocks ({paths[0]}, ...)" if len(paths) > 1 else f"{paths[0]!r}"
    if reason := next((site.splits[path] for path in paths if path in site.splits), None):
        return (
            f"the engine on {site.path!r} has never run for {which}: {reason}. Their gradients are exact, but not this "
            "engine's. Leave the chain out, chains=[...], or change that."
        )
    return (
        f"the engine on {site.path!r} has never run for {which}, but their parameters have got gradients, which are "
        "autograd's own. The model runs layers of a block by themselves, or a forward without its hooks, and bypasses "
        "the engine: call block(x), or leave the chain out, chains=[...]. Only a loss on weights (a penalty) may do so."
    )


class BypassWatch:
    """Warns of gradients that bypass the engine after it has been attached to chains, once.

    Args:
        chains: by path.
    """

    def __init__(self, chains: Mapping[str, Site]):
        self._chains = list(chains.values())
        blocks = (block for site in self._chains for block in site.blocks.values())
        grads = ((p, p.grad) for block in blocks for p in block.parameters())
        self._before = {id(p): weakref.ref(grad) for p, grad in grads if grad is not None}

    def check(self) -> None:
        """Warn if a chain has got gradients that bypass the engine; chains that it has solved are not checked again."""
        self._chains = [site for site in self._chains if _unsolved(site)]
        for site in self._chains:
            if paths := bypassed(site, self._has_new):
                self._chains = []
                warnings.warn(bypass_message(site, paths), stacklevel=3)

    def _has_new(self, parameter: Tensor) -> bool:
        before = self._before.get(id(parameter))
        return parameter.grad is not None and (before is None or before() is not parameter.grad)
