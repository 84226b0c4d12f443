"""Finding a model's chains and telling what stands in an engine's way, without running the model."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from gradfree.chains.refusals import attached
from gradfree.chains.report import Report, path_name
from gradfree.chains.site import Site, enclosing

Kinds = Sequence[type[Site]]


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
        sites = {path: kind(path, modules[path]) for path, kind in _find(model, kinds)}
        problems = _choice_problems(sites, kinds) if sites or not left else []
    else:
        named = [path for path in chains if path in modules]
        problems = list(_path_problems(modules, chains, (*kinds, *left)))
        mine = {path: modules[path] for path in named if not _kind(modules[path], left)}
        sites = {path: kind(path, module) for path, module in mine.items() if (kind := _kind(module, kinds))}
    if left:
        # Where another engine is on what this one leaves alone, autograd would not compute the gradients.
        problems += [problem for path in named for problem in attached(path, modules[path], left)]
    problems += _overlaps(sites)
    problems += [problem for site in sites.values() for problem in site.problems()]
    return Report(sites, problems)


def compiled_around_blocks(model: nn.Module, site: Site) -> str | None:
    """Return the name, for messages, of a compiled module that whole blocks of a chain in depth lie in."""
    if site.dimension == "depth":
        around = {"", *(outer for path in site.blocks for outer in enclosing(path))}
        for where, module in model.named_modules():
            compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
            if compiled and where in around:
                return path_name(where)
    return None


def _kind(module: nn.Module, kinds: Kinds) -> type[Site] | None:
    return next((kind for kind in kinds if kind.accepts(module)), None)


def _find(module: nn.Module, kinds: Kinds, path: str = "") -> Iterator[tuple[str, type[Site]]]:
    """Yield the outermost modules that are chains beyond doubt; of blocks with recurrent layers, the layers."""
    in_time = [kind for kind in kinds if kind.dimension == "time"]
    holds_layers = any(kind.is_evident(m) for kind in in_time for m in module.modules() if m is not module)
    evident = next((kind for kind in kinds if kind.is_evident(module)), None)
    if evident and not holds_layers:
        yield path, evident
        return
    for name, child in module.named_children():
        yield from _find(child, kinds, f"{path}.{name}" if path else name)


def _choice_problems(found: Mapping[str, Site], kinds: Kinds) -> list[str]:
    if not found:
        return [
            f"the model has no chain that can be found without help: {', or '.join(k.looks_like for k in kinds)}. Put "
            "its parts into a container of their own, or name it: chains=['path.to.blocks']."
        ]
    rivals = [path for path, site in found.items() if not site.several]
    if len(rivals) < 2:
        return []
    which = ", ".join(map(path_name, rivals))
    return [f"{len(rivals)} modules look like chains: {which}. Say which: chains={list(found)!r}, or fewer."]


def _path_problems(modules: Mapping[str, nn.Module], chains: Sequence[str], kinds: Kinds) -> Iterator[str]:
    candidates = [path for path, module in modules.items() if _kind(module, kinds)]
    chain = ", or ".join(kind.may_be or kind.looks_like for kind in kinds)
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
