"""Finding a model's chains and telling what stands in an engine's way, without running the model."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from gradfree.chains.refusals import attached
from gradfree.chains.report import Report, path_name
from gradfree.chains.site import Site
from gradfree.depth.site import Container
from gradfree.time.fused import Recurrent
from gradfree.time.unrolled import Unrolled

Kinds = tuple[type[Site], ...]
IN_TIME: Kinds = (Recurrent, Unrolled)
IN_DEPTH: Kinds = (Container,)
KINDS: Kinds = (*IN_TIME, *IN_DEPTH)
"""What engines for any links can solve."""


def validate(model: nn.Module, chains: Sequence[str] | None, kinds: Kinds, left: Kinds = ()) -> Report:
    """Return the chains of ``model`` that are of ``kinds``, and the problems; see :meth:`gradfree.Engine.validate`.

    Args:
        model: any module.
        chains: module paths of the chains, or ``None``.
        kinds: what the engine solves.
        left: what it leaves to autograd. Such chains may be named, and there may be no others.
    """
    if isinstance(chains, str):
        return Report(problems=[f"chains must be a list of module paths: chains=[{chains!r}]."])
    modules = dict(model.named_modules(remove_duplicate=False))
    if chains is None:
        named = [""]
        chains = list(_find(model, kinds))
        problems = _choice_problems(chains, modules, kinds) if chains or not left else []
    else:
        named = [path for path in chains if path in modules]
        problems = list(_path_problems(modules, chains, (*kinds, *left)))
        chains = [path for path in named if not _site(path, modules[path], left)]
    if left:
        # Where another engine is on what this one leaves alone, autograd would not compute the gradients.
        problems += [problem for path in named for problem in attached(path, modules[path], left)]
    sites = {path: site for path in chains if (site := _site(path, modules[path], kinds))}
    problems += _overlaps(sites)
    problems += [problem for site in sites.values() for problem in site.problems()]
    return Report(sites, problems)


def compiled_around_blocks(model: nn.Module, path: str, site: Site) -> str | None:
    """Return the name, for messages, of a compiled module that whole blocks of the container at ``path`` lie in."""
    if isinstance(site, Container):
        around = {"", *site.blocks, *(path.rsplit(".", n)[0] for n in range(path.count(".") + 1))}
        for where, module in model.named_modules():
            compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
            if compiled and where in around:
                return path_name(where)
    return None


def _site(path: str, module: nn.Module, kinds: Kinds) -> Site | None:
    return next((kind(path, module) for kind in kinds if kind.accepts(module)), None)


def _find(module: nn.Module, kinds: Kinds, path: str = "") -> Iterator[str]:
    """Yield the outermost modules that are chains beyond doubt; of blocks with recurrent layers, the layers."""
    in_time = [kind for kind in kinds if not issubclass(kind, Container)]
    holds_layers = any(kind.is_evident(m) for kind in in_time for m in module.modules() if m is not module)
    if any(kind.is_evident(module) for kind in kinds) and not holds_layers:
        yield path
        return
    for name, child in module.named_children():
        yield from _find(child, kinds, f"{path}.{name}" if path else name)


def _choice_problems(found: Sequence[str], modules: Mapping[str, nn.Module], kinds: Kinds) -> list[str]:
    if not found:
        return [
            f"the model has no chain that can be found without help: {', or '.join(k.looks_like for k in kinds)}. Put "
            "its parts into a container of their own, or name it: chains=['path.to.blocks']."
        ]
    containers = [path for path in found if Container.accepts(modules[path])]
    if len(containers) < 2:
        return []
    which = ", ".join(map(path_name, containers))
    return [f"{len(containers)} containers look like chains: {which}. Say which: chains={list(found)!r}, or fewer."]


def _path_problems(modules: Mapping[str, nn.Module], chains: Sequence[str], kinds: Kinds) -> Iterator[str]:
    candidates = [path for path, module in modules.items() if _site(path, module, kinds)]
    in_time = any(not issubclass(kind, Container) for kind in kinds)
    chain = f"an nn.Sequential or nn.ModuleList{', or a recurrent layer' if in_time else ''}"
    if not chains:
        yield "chains=[] names no chain; leave it out to have the chain found."
    for path, times in Counter(chains).items():
        if times > 1:
            yield f"chains names {path!r} {times} times."
        if path not in modules:
            close = difflib.get_close_matches(str(path), candidates, n=1) or candidates
            hint = f"Did you mean {close[0]!r}?" if len(close) == 1 else f"What can be a chain: {close}."
            yield f"the model has no module {path!r}. {hint}"
        elif path not in candidates:
            yield (
                f"{path!r} is of class {type(modules[path]).__name__}, but a chain for this engine is {chain}. "
                f"What can be one: {candidates or 'no module'}."
            )


def _overlaps(sites: Mapping[str, Site]) -> Iterator[str]:
    owner: dict[nn.Module, str] = {}
    for path, site in sites.items():
        for module in {module for block in site.blocks.values() for module in block.modules()}:
            if owner.setdefault(module, path) != path:
                yield (
                    f"the chains {owner[module]!r} and {path!r} share a {type(module).__name__}: chains may neither "
                    "overlap nor lie inside each other. Leave one of them out."
                )
                return
