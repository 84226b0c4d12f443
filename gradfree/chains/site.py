"""A chain's place in a model, where an engine can be attached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal, Protocol

from torch import Tensor, nn

from gradfree.chains.solving import Attachment


def enclosing(path: str) -> list[str]:
    """Return ``path`` and the paths of all modules that contain it, except the model's own."""
    return [path.rsplit(".", n)[0] for n in range(path.count(".") + 1)]


class Removable(Protocol):
    """Something on a model that can be removed, such as a hook."""

    def remove(self) -> None:
        """Remove it from the model."""


class Site(ABC):
    """One chain of a model.

    Attributes:
        path: module path of the container or layer; the model's own is ``""``.
        blocks: the modules whose parameters the chain trains, by module path.
        inside: all modules in the container or layer that take part in the chain, by module path.
        solved: the paths of the blocks that an engine has computed gradients for, in any backward pass so far.
        declared: the residual path K = declared · I given by the user; ``None``: it is read from the graph.
        requires_residual: whether a missing residual path is an error: the chain was named, or is the only one.
        joined: the paths of those that it has solved together with others.
        splits: why a block began a new chain in some forward pass so far, by the block's path.
    """

    dimension: ClassVar[Literal["depth", "time"]] = "depth"
    """Whether links are blocks, whose residual paths are read from their graphs ("depth"), or the steps of one layer
    ("time"). Of a block that contains chains in time, these are found, not the block."""

    of_layers: ClassVar[bool] = False
    """Whether links are single layers with known roles; only engines for single layers use such kinds."""

    is_chain: ClassVar[bool] = True
    """Whether its blocks are solved as one chain, and not each by itself."""

    several: ClassVar[bool] = False
    """Whether all evident chains of a model are attached to; otherwise several evident chains are an error."""

    looks_like: ClassVar[str]
    """Which modules are evidently such chains, in words, for messages."""

    may_be: ClassVar[str] = ""
    """Which modules may be named as such chains, in words, for messages; "": those of ``looks_like``."""

    remedy: ClassVar[str] = ""
    """What to do about a model without such a chain, a sentence for messages; "": nothing that all models can do."""

    @property
    def has_residual(self) -> bool:
        """Whether the chain may have a residual path or gates; whether blocks have one is only known in a pass."""
        return True

    @property
    def hidden_gate(self) -> str:
        """Where the chain has a gate that engines do not see, a sentence that says so, and the remedy; else ""."""
        return ""

    @property
    def can_be_batched(self) -> bool:
        """Whether the VJPs of equal links may run as one batch."""
        return False

    def means(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the running means that ``mean_residual`` keeps, by name: by default none."""
        return {}

    @classmethod
    @abstractmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Return whether ``module`` may be named as such a chain."""

    @classmethod
    def is_evident(cls, module: nn.Module) -> bool:
        """Return whether ``module`` is evidently such a chain, so that it need not be named."""
        return cls.accepts(module)

    @classmethod
    @abstractmethod
    def attachment_on(cls, module: nn.Module) -> Attachment | None:
        """Return the engine that is attached to ``module``, as such a chain or as a block of one."""

    @classmethod
    def stages_of(cls, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return modules inside an evident ``module`` in which to look for chains instead, by their paths in it."""
        return {}

    @classmethod
    def run_in(cls, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return modules in ``module`` that are evidently a chain although it has others, too; by default none."""
        return {}

    @classmethod
    def of_list(cls, modules: Mapping[str, nn.Module]) -> Site | None:
        """Return the chain of a list of modules, by path; ``None`` if chains of this kind are single modules."""
        return None

    def __init__(self, path: str, module: nn.Module):
        """Describe ``module`` as a chain; does not change it."""
        self.path = path
        self.blocks = {path: module}
        self.solved: set[str] = set()
        self.splits: dict[str, str] = {}
        self.joined: set[str] = set()
        self.declared: float | None = None
        self.requires_residual = True
        self.inside = {where: inner for where, inner in module.named_modules(prefix=path) if inner is not module}

    def feedback_weights(self) -> dict[str, Tensor]:
        """Return the weights that replace the layers' weights in the backward pass, by module path: by default none."""
        return {}

    @abstractmethod
    def problems(self) -> Iterator[str]:
        """Yield what prevents attaching an engine."""

    def problems_when_linearised(self) -> Iterator[str]:
        """Yield what else prevents attaching an engine that has no :attr:`~Solver.loops`: by default nothing."""
        return iter(())

    @abstractmethod
    def record(self, attachment: Attachment) -> Sequence[Removable]:
        """Let ``attachment`` solve this chain from now on; return the parts to remove at ``detach()``."""

    @abstractmethod
    def __str__(self) -> str:
        """Return a short description of the chain, such as "12 blocks"."""
