"""Chains in depth: the blocks of an ``nn.Sequential`` or ``nn.ModuleList``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from gradfree.chains.refusals import attached, hooked
from gradfree.chains.site import Site
from gradfree.chains.solving import Attachment
from gradfree.depth.recording import BlockRecorder, RecordedChain
from gradfree.torchside.sharding import own_class, sharded

_CONTAINERS = (nn.Sequential, nn.ModuleList)


class Container(Site):
    """The blocks of a container, run one after the other by it or by the model."""

    looks_like = "an nn.Sequential or nn.ModuleList of at least two blocks, every class of block at least twice"

    def __init__(self, path: str, module: nn.Module):
        super().__init__(path, module)
        self.blocks = {
            f"{path}.{name}" if path else name: block for name, block in module._modules.items() if block is not None
        }

    @staticmethod
    def accepts(module: nn.Module) -> bool:
        """Tell whether ``module`` is a container."""
        return isinstance(module, _CONTAINERS)

    @staticmethod
    def is_evident(module: nn.Module) -> bool:
        """Tell whether it holds two or more composite blocks and every class of them more than once."""
        blocks = list(module.children())
        classes = Counter(map(own_class, blocks))
        return isinstance(module, _CONTAINERS) and min(classes.values(), default=0) > 1 and all(map(_composite, blocks))

    @staticmethod
    def holds_engine(module: nn.Module) -> bool:
        """Tell whether ``module`` is a block with recording hooks."""
        return any(isinstance(getattr(h, "__self__", None), BlockRecorder) for h in module._forward_hooks.values())

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the blocks."""
        if not self.blocks:
            yield f"{self.path!r} has no blocks."
        yield from sharded(self.inside)
        yield from hooked(self.inside)
        first: dict[nn.Module, str] = {}
        for path, block in self.blocks.items():
            if first.setdefault(block, path) != path:
                yield (
                    f"{first[block]} and {path} are the same module: a chain runs each block once. Give each its own "
                    "module; they may share parameters."
                )
            yield from _block_problems(path, block)

    def means(self) -> dict[str, tuple[int, ...]]:
        """Return one number's shape."""
        return {"residual": ()}

    @property
    def can_be_lean(self) -> bool:
        """Never: the blocks keep what autograd keeps of them."""
        return False

    def record(self, attachment: Attachment) -> list[RemovableHandle]:
        """Put the recording hooks on the blocks."""
        return RecordedChain(attachment, self).record()

    def __str__(self) -> str:
        return f"{len(self.blocks)} blocks"


def _composite(module: nn.Module) -> bool:
    """Tell a block from a layer of torch's own and from a container, which may itself hold a chain."""
    own = not own_class(module).__module__.startswith("torch.nn.")
    return not isinstance(module, _CONTAINERS) and (own or any(True for _ in module.children()))


def _block_problems(path: str, block: nn.Module) -> Iterator[str]:
    yield from attached(path, block, [Container])
    names = {base.__name__ for module in block.modules() for base in type(module).__mro__}
    if "ScriptModule" in names:
        yield f"{path} contains a scripted module, which hides its graph from Python. Use the eager module."
    if any(map(is_lazy, block.parameters())):
        yield f"{path} has uninitialised lazy parameters: run the model once, then attach."
