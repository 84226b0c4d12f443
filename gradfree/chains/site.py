"""A place in a model where an engine can be attached: one chain, before any pass has run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal, Protocol

from torch import Tensor, nn

from gradfree.chains.solving import Attachment


def enclosing(path: str) -> list[str]:
    """Return ``path`` and the paths of all modules that it lies in, but for the model's own."""
    return [path.rsplit(".", n)[0] for n in range(path.count(".") + 1)]


class Removable(Protocol):
    """Something put on a model that can be taken off."""

    def remove(self) -> None:
        """Take it off."""


class Site(ABC):
    """One chain of a model.

    Attributes:
        path: module path of the container or layer; the model's own is ``""``.
        blocks: the modules whose parameters the chain trains, by module path.
        inside: everything in the container or layer that takes part in the chain, by module path.
        solved: the paths of the blocks that an engine has computed gradients of, in any backward pass so far.
        declared: the residual path that the user has declared, a multiple of the identity; ``None``: it is read.
        requires_residual: whether it was named, or is the only one that was found.
        splits: why blocks did not go on the chain of the block before them, in any forward pass so far, by their paths.
    """

    dimension: ClassVar[Literal["depth", "time"]] = "depth"
    """Whether links are blocks, whose graphs tell of their residual paths, or steps of one layer. Of a block with
    layers in it that are chains in time, those are found."""

    of_layers: ClassVar[bool] = False
    """Whether links are single layers whose roles are known, for engines that take them apart, and for these alone."""

    several: ClassVar[bool] = False
    """Whether all evident chains of a model are found, rather than one of them or, of several, none."""

    looks_like: ClassVar[str]
    """What is such a chain beyond doubt, for messages."""

    may_be: ClassVar[str] = ""
    """What may be named as one, for messages, if that is more."""

    @property
    def has_residual(self) -> bool:
        """Whether the chain may have a residual path or gates; only a pass tells whether blocks do."""
        return True

    @property
    def can_be_batched(self) -> bool:
        """Whether links that are alike may be pulled through in batches."""
        return False

    @abstractmethod
    def means(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the running means that ``mean_residual`` keeps of the chain, by name."""

    @classmethod
    @abstractmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Return whether ``module`` may be named as such a chain."""

    @classmethod
    def is_evident(cls, module: nn.Module) -> bool:
        """Return whether ``module`` is such a chain beyond doubt, so that it need not be named."""
        return cls.accepts(module)

    @classmethod
    @abstractmethod
    def attachment_on(cls, module: nn.Module) -> Attachment | None:
        """Return the engine that is on ``module``, as such a chain or as a block of one."""

    @classmethod
    def holds_engine(cls, module: nn.Module) -> bool:
        """Return whether an engine is on ``module``."""
        return cls.attachment_on(module) is not None

    @classmethod
    def stages_of(cls, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return modules inside an evident ``module`` to look for chains in instead, by their paths in it."""
        return {}

    @classmethod
    def of_row(cls, modules: Mapping[str, nn.Module]) -> Site | None:
        """Return the chain of some modules of a model, by path; ``None`` if this kind is of single modules."""
        return None

    def __init__(self, path: str, module: nn.Module):
        """Describe ``module`` as a chain; changes nothing."""
        self.path = path
        self.blocks = {path: module}
        self.solved: set[str] = set()
        self.splits: dict[str, str] = {}
        self.declared: float | None = None
        self.requires_residual = True
        self.inside = {where: inner for where, inner in module.named_modules(prefix=path) if inner is not module}

    def feedback_weights(self) -> dict[str, Tensor]:
        """Return what errors go back through in place of layers' weights, by module path: here, nothing."""
        return {}

    @abstractmethod
    def problems(self) -> Iterator[str]:
        """Yield what must be changed before an engine can be attached."""

    @abstractmethod
    def record(self, attachment: Attachment) -> Sequence[Removable]:
        """Let ``attachment`` solve this chain from now on; return what to take off again."""

    @abstractmethod
    def __str__(self) -> str:
        """Say in a few words what the chain consists of."""
