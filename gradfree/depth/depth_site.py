"""Places of chains in depth: the blocks of an ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict``."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradfree.chains.refusals import problems_of_attached, problems_of_backward_hooks
from gradfree.chains.site import Removable, Site, enclosing
from gradfree.chains.solving import Attachment
from gradfree.depth.recorder import BlockRecorder, RecordedChain
from gradfree.errors import LAZY, SCRIPTED
from gradfree.torchside.sharding import is_torchs_own, own_class, problems_of_shards

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Blocks(Site):
    """Blocks inside a module, which it or the model around it runs one after the other.

    Base class of kinds of chains in depth. A subclass defines the blocks (:meth:`blocks_of`), the accepted modules
    (:meth:`accepts`) and their description for messages (``looks_like``).
    """

    def __init__(self, path: str, module: nn.Module):
        super().__init__(path, module)
        self._container = module
        self.blocks = self.present_blocks()
        around = {outer for block in self.blocks for outer in enclosing(block)}
        self.inside = {
            where: inner
            for where, inner in self.inside.items()
            if where in around or not self.blocks.keys().isdisjoint(enclosing(where))
        }

    @classmethod
    def of_list(cls, modules: Mapping[str, nn.Module]) -> Blocks:
        """Return the chain of ``modules``, by their paths in the model, in this order."""
        site = cls.__new__(cls)
        Site.__init__(site, ", ".join(modules), nn.Identity())
        site._container = nn.Identity()
        site.blocks = dict(modules)
        site.inside = {where: m for path, block in modules.items() for where, m in block.named_modules(prefix=path)}
        return site

    def present_blocks(self) -> dict[str, nn.Module]:
        """Return the blocks that the container has now, by module path; none of a chain of named modules."""
        return {f"{self.path}.{n}" if self.path else n: block for n, block in self.blocks_of(self._container).items()}

    @classmethod
    @abstractmethod
    def blocks_of(cls, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return the blocks of ``module`` by their paths inside it, in the order in which they run."""

    @classmethod
    def attachment_on(cls, module: nn.Module) -> Attachment | None:
        """Return the attachment whose recorder has hooks on ``module``; ``None`` if there is none."""
        hooks = (getattr(hook, "__self__", None) for hook in module._forward_hooks.values())
        return next((hook.chain.attachment for hook in hooks if isinstance(hook, BlockRecorder)), None)

    def problems(self) -> Iterator[str]:
        """Yield why no engine can be attached to the blocks."""
        if not self.blocks:
            yield f"{self.path!r} has no blocks."
        yield from problems_of_shards(self.inside)
        yield from problems_of_backward_hooks(self.inside)
        for path, block in self.blocks.items():
            yield from _block_problems(path, block)
        blocks = self.blocks.items()
        taken = [problem for path, block in blocks for problem in problems_of_attached(path, block, [Container])]
        yield from taken[:1]  # The remedy is the same for all.

    def means(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of the running mean of the residual path: one number."""
        return {"residual": ()}

    def record(self, attachment: Attachment) -> list[Removable]:
        """Put the recorder's hooks on the blocks."""
        return RecordedChain(attachment, self).record()

    def __str__(self) -> str:
        return f"{len(self.blocks)} blocks"


class Container(Blocks):
    """All children of an ``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict``."""

    several = True
    looks_like = (
        "an nn.Sequential or nn.ModuleList of at least two blocks, none a container, every class at least twice, "
        "or an nn.Sequential of nn.Sequentials that are alike"
    )
    may_be = "an nn.Sequential, nn.ModuleList or nn.ModuleDict"
    remedy = "Put its blocks into one, or name them in order: chains=[['block1', 'block2']]."

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Return whether ``module`` is a container."""
        return isinstance(module, _CONTAINERS)

    @classmethod
    def is_evident(cls, module: nn.Module) -> bool:
        """Return whether ``module`` is a list of two or more composite blocks, each class at least twice.

        Blocks may be containers if no chain can be inside them and an ``nn.Sequential`` runs them.
        """
        blocks = list(cls.blocks_of(module).values())
        classes = Counter(own_class(getattr(block, "_orig_mod", block)) for block in blocks)  # Compiled, or not.
        ordered = cls.accepts(module) and not isinstance(module, nn.ModuleDict)
        are_blocks = all(map(_composite, blocks)) or (type(module) is nn.Sequential and _equal_sequentials(blocks))
        return ordered and min(classes.values(), default=0) > 1 and are_blocks

    @classmethod
    def blocks_of(cls, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return the children; one that has several names is there several times."""
        return {name: block for name, block in module._modules.items() if block is not None}

    @classmethod
    def run_in(cls, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return the longest run of composite blocks of one class, two or more, of an ``nn.Sequential``."""
        if type(module) is not nn.Sequential:
            return {}
        runs = [dict(run) for _, run in groupby(cls.blocks_of(module).items(), lambda item: own_class(item[1]))]
        longest = max(runs, key=len, default={})
        return longest if len(longest) > 1 and all(map(_composite, longest.values())) else {}

    @classmethod
    def stages_of(cls, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return the evident containers inside the blocks, if the blocks are stages, each with other shapes."""
        blocks = cls.blocks_of(module)
        shapes = set(map(_shapes, blocks.values()))
        inner = {
            f"{name}.{child_name}": child
            for name, block in blocks.items()
            for child_name, child in block.named_children()
            if cls.is_evident(child)
        }
        return inner if len(shapes) == len(blocks) and 2 * len(inner) >= len(blocks) else {}


def _composite(module: nn.Module) -> bool:
    """Return whether ``module`` is a block: neither a container, which may hold a chain, nor one of torch's layers."""
    has_layers = any(True for _ in module.children())
    return not isinstance(module, _CONTAINERS) and (not is_torchs_own(module) or has_layers)


def _equal_sequentials(blocks: Sequence[nn.Module]) -> bool:
    """Return whether all blocks are ``nn.Sequential`` of the same layers and none of them contains a chain."""
    sequential = all(type(block) is nn.Sequential for block in blocks)
    layers = {(_shapes(block), *map(type, block.modules())) for block in blocks}
    inner = {module for block in blocks for module in block.modules()}
    return sequential and len(layers) == 1 and any(map(_shapes, blocks)) and not any(map(Container.is_evident, inner))


def _shapes(block: nn.Module) -> tuple[torch.Size, ...]:
    return tuple(p.shape for p in block.parameters() if not is_lazy(p))


def _block_problems(path: str, block: nn.Module) -> Iterator[str]:
    names = {base.__name__ for module in block.modules() for base in type(module).__mro__}
    if "ScriptModule" in names:
        yield SCRIPTED.message(path=path)
    if any(map(is_lazy, block.parameters())):
        yield LAZY.message(path=path)
