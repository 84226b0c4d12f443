"""Finds a model's chains, and what prevents attaching an engine to them, without running the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradfree.chains.refusals import problems_of_attached
from gradfree.chains.report import Report, path_name
from gradfree.chains.site import Site
from gradfree.entries import ENGINES, lookup
from gradfree.time.cell_layer import ElementwiseCell, or_torchs_layer
from gradfree.torchside.sharding import is_torchs_own, own_class
from gradfree.wording import did_you_mean

Kinds = Sequence[type[Site]]
Chains = Sequence[str | Sequence[str]]
"""Module paths of chains; a list of paths in place of a path is the chain of these modules, in this order."""

BEST_FIRST = ("shooting", "newton", "highway_bp", "fixed_point", "truncated", "dsf", "deeppcr", "backprop")
"""Engines for any blocks and recurrent layers that a refusal proposes if they accept the model, by their worth."""


def validate(model: nn.Module, chains: Chains | None, kinds: Kinds, left: Kinds = ()) -> Report:
    """Return the chains of ``model`` that are of ``kinds``, and the problems; see :meth:`gradfree.Engine.validate`.

    Args:
        model: any module.
        chains: the chains, or ``None`` to find them.
        kinds: the kinds of chains that the engine solves.
        left: the kinds that it leaves to autograd. They may be named, and a model may have only chains of these kinds.
    """
    if chains is not None and not _names_modules(chains):
        return Report(problems=[f"chains must be a list of module paths, chains=['blocks'], not {chains!r:.80}."])
    if isinstance(model, torch.jit.ScriptModule):
        return Report(problems=["the model is scripted, which hides its blocks from Python. Use the eager module."])
    modules = dict(model.named_modules(remove_duplicate=False))
    if chains is None:
        named = [""]
        sites = {path: kind(path, modules[path]) for path, kind in _find(model, kinds, seen=set())}
        if not sites and not any(_find(model, left, seen=set())):
            sites = _runs(modules, kinds, left)
        if sites or not left:
            problems = _choice_problems(modules, sites, kinds)
        else:
            problems = [] if any(_find(model, left, seen=set())) else [*_looped_cells(modules, kinds)]
    else:
        paths = [path for path in chains if isinstance(path, str)]
        lists = [each for each in chains if not isinstance(each, str)]
        named = [path for each in (paths, *lists) for path in each if path in modules]
        problems = [*_path_problems(modules, paths, lists, (*kinds, *left))]
        mine = {path: modules[path] for path in paths if path in modules and not _kind(modules[path], left)}
        sites = {path: kind(path, module) for path, module in mine.items() if (kind := _kind(module, kinds))}
        if not problems:
            found = [_listed({path: modules[path] for path in each}, kinds, left) for each in lists]
            sites |= {site.path: site for site in found if site is not None}
    if left:
        # With another engine on a chain that is left to autograd, autograd would not compute the gradients.
        problems += [problem for path in named for problem in problems_of_attached(path, modules[path], left)]
    problems += _overlaps(sites)
    problems += [problem for site in sites.values() for problem in site.problems()]
    return Report(sites, problems)


def alternatives(model: nn.Module, chains: Chains | None) -> Iterator[str]:
    """Yield notes about engines that accept ``model``, best first, by the chains that they take.

    Args:
        model: any module.
        chains: as in :meth:`gradfree.Engine.validate`.
    """
    accepting: dict[tuple[str, ...], list[str]] = {}
    for name in BEST_FIRST:
        try:
            engine = lookup(ENGINES, name, {})()
        except ValueError:  # Another package has an engine of this name.
            continue
        report = engine.find(model, chains)
        sites = report.chains.values()
        if report.ok and sites and not any(problem for site in sites for problem in engine.problems_with(site)):
            accepting.setdefault(tuple(report.chains), []).append(name)
    for paths, names in accepting.items():
        *first, last = map(repr, names)
        there = f"there are the engines {', '.join(first)} and {last}" if first else f"there is the engine {last}"
        yield f"for {', '.join(map(path_name, paths))} {there}."


def _names_modules(chains: Any) -> bool:
    """Return whether ``chains`` is a list of paths, or of lists of paths."""
    if isinstance(chains, str) or not isinstance(chains, Sequence):
        return False
    lists = [[each] if isinstance(each, str) else each for each in chains]
    return all(isinstance(each, Sequence) and all(isinstance(path, str) for path in each) for each in lists)


def _kind(module: nn.Module, kinds: Kinds) -> type[Site] | None:
    return next((kind for kind in kinds if kind.accepts(module)), None)


def _listed(modules: Mapping[str, nn.Module], kinds: Kinds, left: Kinds) -> Site | None:
    """Return the chain of a list of ``modules``, of the first kind with one; ``None`` if that kind is in ``left``."""
    found = ((kind, kind.of_list(modules)) for kind in (*kinds, *left))
    return next((None if kind in left else site for kind, site in found if site is not None), None)


def _find(
    module: nn.Module, kinds: Kinds, seen: set[nn.Module], path: str = "", staged: bool = False
) -> Iterator[tuple[str, type[Site]]]:
    """Yield the modules that are evidently chains (``Site.is_evident``), each once.

    Of nested chains these are the outermost. Of blocks that contain recurrent layers, they are the layers. Of a
    container of stages, they are the chains in the stages.
    """
    if module in seen:
        return
    seen.add(module)
    in_time = [kind for kind in kinds if kind.dimension == "time"]
    holds_layers = any(kind.is_evident(m) for kind in in_time for m in module.modules() if m is not module)
    evident = next((kind for kind in kinds if kind.is_evident(module)), None)
    inner: Mapping[str, nn.Module] = {} if staged or evident is None else evident.stages_of(module)
    if evident and not holds_layers and not inner:
        yield path, evident
        return
    for name, child in inner.items() or module.named_children():
        yield from _find(child, kinds, seen, f"{path}.{name}" if path else name, bool(inner))


def _runs(modules: Mapping[str, nn.Module], kinds: Kinds, left: Kinds) -> dict[str, Site]:
    """Return the chains of the longest run of blocks of one class in each ``nn.Sequential``, by their paths."""
    runs = {
        path: {f"{path}.{name}" if path else name: block for name, block in run.items()}
        for path, module in modules.items()
        for kind in kinds
        if not kind.of_layers and (run := kind.run_in(module))
    }
    found = [_listed(run, kinds, left) for run in runs.values()]
    return {site.path: site for site in found if site is not None}


def _choice_problems(modules: Mapping[str, nn.Module], found: Mapping[str, Site], kinds: Kinds) -> list[str]:
    if not found:
        return _nothing_found(modules, kinds)
    rivals = [path for path, site in found.items() if not site.several]
    if len(rivals) < 2:
        return []
    which = ", ".join(map(path_name, rivals))
    return [f"{len(rivals)} modules look like chains: {which}. Say which: chains={list(found)!r}, or fewer."]


def _nothing_found(modules: Mapping[str, nn.Module], kinds: Kinds) -> list[str]:
    evident = ", or ".join(kind.looks_like for kind in kinds if kind.looks_like)
    what = f"the model has no chain that can be found without help: {evident}."
    sites = {
        path: kind(path, module)
        for path, module in modules.items()
        if "parametrizations" not in path.split(".") and (kind := _kind(module, kinds))
    }
    likely = _likely_blocks(modules, kinds)
    if nameable := [path for path, site in sites.items() if not any(site.problems())]:
        return [f"{what}{likely} What can be named, chains=[...]: {nameable}."]
    if cells := [*_looped_cells(modules, kinds)]:
        return cells
    if likely:
        return [f"{what}{likely}"]
    nearest = max(sites.values(), key=lambda site: len(site.blocks), default=None)
    if nearest is not None and nearest.blocks:
        return [f"{what} {next(nearest.problems())}"]
    nothing = "It has none of these. `gradfree advise` tries all engines that fit it."
    return [f"{what} {next((kind.remedy for kind in kinds if kind.remedy), nothing)}"]


def _likely_blocks(modules: Mapping[str, nn.Module], kinds: Kinds) -> str:
    """Return a hint at the attributes of one class, not one of torch's, that have the most parameters; "": none."""
    if all(kind.dimension == "time" or kind.of_layers for kind in kinds):
        return ""
    alike: dict[tuple[str, type], dict[str, int]] = {}
    for path, module in modules.items():
        if not is_torchs_own(module):
            for name, child in module.named_children():
                size = sum(p.numel() for p in child.parameters() if not is_lazy(p))
                if size and not is_torchs_own(child):
                    alike.setdefault((path, own_class(child)), {})[f"{path}.{name}" if path else name] = size
    most = max((sizes for sizes in alike.values() if len(sizes) > 1), key=lambda sizes: sum(sizes.values()), default={})
    return f" If these are its blocks, in this order, name them: chains={[list(most)]!r}." if most else ""


def _path_problems(
    modules: Mapping[str, nn.Module], paths: Sequence[str], lists: Sequence[Sequence[str]], kinds: Kinds
) -> Iterator[str]:
    candidates = [path for path, module in modules.items() if _kind(module, kinds)]
    chain = ", or ".join(dict.fromkeys(kind.may_be or kind.looks_like for kind in kinds))
    if not all((paths or lists, *lists)):
        yield "chains contains an empty list, which names no chain; leave it out to have the chain found."
    for path in dict.fromkeys(path for each in (paths, *lists) for path in each):
        if path not in modules:
            hint = did_you_mean(path, candidates) or f" Possible chains: {candidates or 'none'}."
            yield f"the model has no module {path!r}.{hint}"
    for each in lists:
        named = {path: modules[path] for path in each if path in modules}
        if named and all(kind.of_list(named) is None for kind in kinds):
            yield f"{list(each)!r} is a list of blocks, but a chain for this engine is {chain}."
    blocks = []
    for path in (path for path in dict.fromkeys(paths) if path in modules and path not in candidates):
        cell = [*_looped_cells({path: modules[path]}, kinds)]
        yield from cell
        blocks += [] if cell else [path]
    if blocks:
        classes = ", ".join(dict.fromkeys(type(modules[path]).__name__ for path in blocks))
        in_time = all(kind.dimension == "time" for kind in kinds)
        likely = _likely_blocks({path: modules[path] for path in blocks}, kinds)
        example = [blocks if len(blocks) > 1 else ["b1", "b2"]]
        or_list = "" if in_time or likely else f", or a list of blocks: {example}"
        yield (
            f"{', '.join(map(repr, blocks))} {'is' if len(blocks) == 1 else 'are'} of class {classes}, but a chain for "
            f"this engine is {chain}. Possible chains: {candidates or 'none'}{or_list}.{likely}"
        )


def _overlaps(sites: Mapping[str, Site]) -> Iterator[str]:
    owner: dict[nn.Module, str] = {}
    for path, site in sites.items():
        for module in {module for block in site.blocks.values() for module in block.modules()}:
            if owner.setdefault(module, path) != path:
                yield (
                    f"the chains {owner[module]!r} and {path!r} share a {type(module).__name__}: chains must neither "
                    "overlap nor contain each other. Leave one of them out."
                )
                return


def _looped_cells(modules: Mapping[str, nn.Module], kinds: Sequence[type[Site]]) -> Iterator[str]:
    """Yield a problem for each known cell among ``modules``, if ``kinds`` contains chains in time."""
    if any(kind.dimension == "time" for kind in kinds):
        for path, module in modules.items():
            if isinstance(module, nn.RNNCellBase | ElementwiseCell):
                yield (
                    f"{path_name(path)} is of class {type(module).__name__}, a cell that is called step by step, which "
                    "is not a chain. Use a layer that runs all steps: "
                    f"gradfree.CellLayer(cell){or_torchs_layer(module)}."
                )
