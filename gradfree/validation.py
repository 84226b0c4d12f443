"""Finding a model's chains and telling what stands in an engine's way, without running the model."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parameter import is_lazy

from gradfree.recording import BlockRecorder

_CONTAINERS = (nn.Sequential, nn.ModuleList)


@dataclass(frozen=True)
class Report:
    """What an engine would do with a model.

    Attributes:
        chains: for each chain, its container's module path and the blocks by path, in order.
        problems: what must be changed first, each with the module path and the remedy.
    """

    chains: Mapping[str, Mapping[str, nn.Module]] = field(default_factory=dict)
    problems: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether the engine can be attached."""
        return not self.problems

    def __str__(self) -> str:
        lines = [f"chain {_named(path)}: {len(blocks)} blocks" for path, blocks in self.chains.items()]
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines) or "no chain is touched"


def validate(model: nn.Module, chains: Sequence[str] | None = None) -> Report:
    """Return the chains of ``model`` and the problems with them; see :meth:`gradfree.Engine.validate`."""
    if isinstance(chains, str):
        return Report(problems=[f"chains must be a list of module paths: chains=[{chains!r}]."])
    modules = dict(model.named_modules(remove_duplicate=False))
    problems = list(_container_problems(modules, chains)) if chains is not None else []
    if chains is None:
        chains = list(_find(model))
        problems += _choice_problems(chains)
    found = {path: _blocks(path, modules) for path in chains if isinstance(modules.get(path), _CONTAINERS)}
    problems += _overlaps(found)
    for blocks in found.values():
        problems += _block_problems(blocks)
    return Report(found, problems)


def _named(path: str) -> str:
    return repr(path) if path else "'' (the model itself)"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _blocks(path: str, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {_join(path, name): modules[_join(path, name)] for name in modules[path]._modules}


def _find(module: nn.Module, path: str = "") -> Iterator[str]:
    """Yield the outermost containers of two or more composite blocks whose every class occurs more than once."""
    children = list(module.children())
    classes = Counter(map(type, children))
    if isinstance(module, _CONTAINERS) and min(classes.values(), default=0) > 1 and all(map(_composite, children)):
        yield path
        return
    for name, child in module.named_children():
        yield from _find(child, _join(path, name))


def _composite(module: nn.Module) -> bool:
    """Tell a block from a layer of torch's own and from a container, which may itself hold a chain."""
    own = not type(module).__module__.startswith("torch.nn.")
    return not isinstance(module, _CONTAINERS) and (own or any(True for _ in module.children()))


def _choice_problems(found: Sequence[str]) -> list[str]:
    if len(found) == 1:
        return []
    if found:
        which = ", ".join(map(_named, found))
        return [f"{len(found)} containers look like chains: {which}. Say which: chains={list(found)!r}, or fewer."]
    return [
        "the model has no chain that can be found without help: an nn.Sequential or nn.ModuleList of at least two "
        "blocks, every class of block at least twice. Put the blocks into a container of their own, or name it: "
        "chains=['path.to.blocks']."
    ]


def _container_problems(modules: Mapping[str, nn.Module], chains: Sequence[str]) -> Iterator[str]:
    containers = [path for path, module in modules.items() if isinstance(module, _CONTAINERS)]
    if not chains:
        yield "chains=[] names no chain; leave it out to have the chain found."
    for path, times in Counter(chains).items():
        if times > 1:
            yield f"chains names {path!r} {times} times."
        if path not in modules:
            close = difflib.get_close_matches(str(path), containers, n=1) or containers
            hint = f"Did you mean {close[0]!r}?" if len(close) == 1 else f"Its containers are {close}."
            yield f"the model has no module {path!r}. {hint}"
        elif not isinstance(modules[path], _CONTAINERS):
            yield (
                f"{path!r} is a {type(modules[path]).__name__}, but a chain is an nn.Sequential or nn.ModuleList of "
                f"blocks. The model's containers are {containers}."
            )
        elif not modules[path]._modules:
            yield f"{path!r} has no blocks."


def _overlaps(chains: Mapping[str, Mapping[str, nn.Module]]) -> Iterator[str]:
    owner: dict[nn.Module, str] = {}
    for path, blocks in chains.items():
        for block in blocks.values():
            for module in set(block.modules()):
                if owner.setdefault(module, path) != path:
                    yield (
                        f"the chains {owner[module]!r} and {path!r} share a {type(module).__name__}: chains may "
                        "neither overlap nor lie inside each other. Leave one of them out."
                    )
                    return


def _block_problems(blocks: Mapping[str, nn.Module]) -> Iterator[str]:
    first: dict[nn.Module, str] = {}
    for path, block in blocks.items():
        if first.setdefault(block, path) != path:
            yield (
                f"{first[block]} and {path} are the same module: a chain runs each block once. Give each its own "
                "module; they may share parameters."
            )
        if any(isinstance(getattr(h, "__self__", None), BlockRecorder) for h in block._forward_hooks.values()):
            yield f"{path} has an engine attached already: call detach() on its handle first."
        if block._backward_hooks or block._backward_pre_hooks:
            yield (
                f"{path} has full backward hooks: they would see a state's direct cotangent only, not its whole "
                "gradient. Remove them while an engine is attached."
            )
        yield from _kind_problems(path, block)


def _kind_problems(path: str, block: nn.Module) -> Iterator[str]:
    names = {base.__name__ for module in block.modules() for base in type(module).__mro__}
    if names & {"FSDPModule", "FullyShardedDataParallel"}:
        yield (
            f"{path} is sharded by FSDP: its parameters would get no gradient. Shard the model's root only, "
            "fully_shard(model)."
        )
    if "ScriptModule" in names:
        yield f"{path} contains a scripted module, which hides its graph from Python. Use the eager module."
    if any(map(is_lazy, block.parameters())):
        yield f"{path} has uninitialised lazy parameters: run the model once, then attach."
