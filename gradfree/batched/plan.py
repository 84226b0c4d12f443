"""What is known of the passes of one kind, and of one pass, as far as its blocks may be batched."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gradfree.batched.alike import Slot
from gradfree.batched.batch import Autocast
from gradfree.batched.stacks import Stacks


@dataclass
class BatchPlan:
    """What is known of passes of one kind.

    Attributes:
        groups: the paths of blocks that are alike and could be batched.
        reasons: why others cannot be, by path.
        residual: what the residual paths of blocks that are batched carry, by path.
        settled: whether a pass has shown which are.
        whole: whether all of the chain's are.
    """

    groups: list[list[str]]
    reasons: dict[str, str]
    residual: dict[str, float] = field(default_factory=dict)
    settled: bool = False
    whole: bool = False


class Setting:
    """One pass, as far as its blocks may be batched.

    Attributes:
        plan: for passes of its kind.
        tensors: all parameters and buffers of the blocks.
        places: the numbers of each block's among them, and where the block has them, by path.
        trained: which of them need a gradient, as the pass began.
        held: what else the blocks held then.
        autocast: as it is in the pass.
        state: what enters the chain.
        initial: whether that needs a gradient.
        apart: why blocks must not be batched in this pass, by path.
        columns: their trained parameters, if they are stacked already.
    """

    def __init__(
        self,
        plan: BatchPlan,
        tensors: list[Tensor],
        places: Mapping[str, Sequence[tuple[int, Slot]]],
        trained: Sequence[bool],
        held: Hashable,
        autocast: Autocast,
        state: Tensor,
    ):
        self.plan, self.tensors, self.places, self.autocast = plan, tensors, places, autocast
        self.trained, self.held = trained, held
        self.initial, self.state = state.requires_grad, state.detach()
        self.apart: dict[str, str] = {}
        self.columns: Stacks | None = None
        self._versions = self._counted()

    def _counted(self) -> int:
        return sum([tensor._version for tensor in self.tensors])

    @property
    def is_as_it_was(self) -> bool:
        """Whether no parameter and no buffer has been changed in place since."""
        return self._counted() == self._versions

    def is_batched(self, path: str) -> bool:
        """Tell whether the block at ``path`` is to run without a graph."""
        return path in self.plan.residual and self.has_its_tensors(path)

    def has_lost(self, path: str) -> bool:
        """Tell whether the block at ``path``, which has just run, has other tensors than when the pass began."""
        return not self.has_its_tensors(path)

    def has_its_tensors(self, path: str) -> bool:
        """Tell whether the block at ``path`` has the tensors of the pass: functional_call gives it others."""
        return not [1 for n, (own, key) in self.places[path] if own.get(key) is not self.tensors[n]]
