"""The handle of an engine that is attached to a model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from gradfree.chains.bypass import bypass_message, unsolved
from gradfree.chains.lesson import Lesson
from gradfree.chains.memory import Memory, average_means
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment


class Handle:
    """An engine attached to a model; :meth:`detach`, or the end of its ``with`` block, restores the model.

    Attributes:
        chains: the chains by module path.
        attachments: the engine on each chain, by module path.
    """

    def __init__(
        self,
        parts: Sequence[Removable] = (),
        chains: Mapping[str, Site] | None = None,
        attachments: Mapping[str, Attachment] | None = None,
    ):
        self._parts = parts
        self.chains = chains or {}
        self.attachments = attachments or {}
        self._watched = list(self.chains.values())
        blocks = (block for site in self._watched for block in site.blocks.values())
        grads = ((p, p.grad) for block in blocks for p in block.parameters())
        self._before = {id(p): weakref.ref(grad) for p, grad in grads if grad is not None}

    def add(self, other: Handle) -> None:
        """Take over the chains of another handle, on other modules of the same model."""
        self._parts = [*self._parts, *other._parts]
        self.chains = {**self.chains, **other.chains}
        self.attachments = {**self.attachments, **other.attachments}
        self._watched += other._watched
        self._before |= other._before

    @property
    def attached(self) -> bool:
        """Whether the engine is attached."""
        return bool(self._parts)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The modules whose parameters the chains train, by module path."""
        return {path: block for site in self.chains.values() for path, block in site.blocks.items()}

    def detach(self) -> None:
        """Detach the engine; a second call does nothing. Graphs that are already recorded keep the engine.

        Gives the warning of :meth:`watch`.
        """
        self.watch()
        self._watched = []
        for part in self._parts:
            part.remove()
        self._parts = []

    def watch(self) -> None:
        """Warn, once, if parameters of a chain have autograd's gradients.

        A model that runs layers of a block by themselves bypasses the engine. If it computes something between all
        blocks, or runs them side by side, each of them is a separate chain, and the engine has no effect.
        ``EngineOptimizer`` and Lightning's strategies call this after each step. It costs nothing once the engine has
        computed gradients for every block.
        """
        for site in self._watched:
            if message := bypass_message(site, self._has_new_gradient):
                self._watched = []
                warnings.warn(message, stacklevel=2)
        self._watched = [site for site in self._watched if unsolved(site)]

    def _has_new_gradient(self, parameter: Tensor) -> bool:
        before = self._before.get(id(parameter))
        return parameter.grad is not None and (before is None or before() is not parameter.grad)

    def exactly(self) -> AbstractContextManager[None]:
        """Let backpropagation solve this handle's chains, not the engine, in backward passes inside the ``with``."""
        return self.setting(use_exact=True)

    def lesson(self, targets: Any = None, loss: Callable[[], Tensor] | None = None) -> AbstractContextManager[None]:
        """Give what backward passes inside the ``with`` learn from, for engines that need more than a gradient.

        Each such pass must be of the whole batch, once. Engines that do not need it ignore it.

        Args:
            targets: of the batch: class indices (N,), or numbers (N, ...).
            loss: runs the model on the batch again and returns the loss that ``backward()`` is called on, scaled alike:
                ``lambda: loss_fn(model(x), y)``.
        """
        return self.setting(lesson=Lesson(targets, loss))

    def frozen(self) -> AbstractContextManager[None]:
        """Keep the engine's own tensors from learning in backward passes inside the ``with``."""
        return self.setting(frozen=True)

    @contextmanager
    def setting(self, **attributes: Any) -> Iterator[None]:
        """Set attributes of every chain's :class:`~gradfree.chains.solving.Attachment` inside the ``with``."""
        before = [(attachment, dict(vars(attachment))) for attachment in self.attachments.values()]
        for attachment, _ in before:
            vars(attachment).update(attributes)
        try:
            yield
        finally:
            for attachment, old in before:
                vars(attachment).update({name: old[name] for name in attributes})

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the tensors that the engine keeps from pass to pass, by module path; empty for most engines."""
        kept = {path: attachment.memory.state_dict() for path, attachment in self.attachments.items()}
        return {path: state for path, state in kept.items() if state}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            ValueError: ``state`` has a chain that this handle does not have, or a name that is none of a chain's state;
                nothing is loaded then.
        """
        if unknown := state.keys() - self.attachments.keys():
            raise ValueError(
                f"no chains {sorted(unknown)} here; there are {sorted(self.attachments)} ('' is the model itself). "
                "Attach the engine whose state was saved, to the same chains, or load only the model's weights: "
                "model.load_state_dict(...), in Lightning without ckpt_path."
            )
        for of_chain in state.values():
            Memory.check(of_chain)
        for path, attachment in self.attachments.items():
            attachment.memory.load_state_dict(state.get(path, {}))

    def load_own(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the entries of ``state`` for this handle's chains; others may be of another handle on the model.

        Raises:
            ValueError: as in :meth:`load_state_dict`.
        """
        self.load_state_dict({path: kept for path, kept in state.items() if path in self.attachments})

    def average_over_ranks(self) -> None:
        """Average the running means that the engine keeps over all ranks of ``torch.distributed``.

        For data parallel training: call it on every rank after each step of the optimizer, since a batch only changes
        the means of its own rank. Lightning's strategies do so. The process group must be initialized. Does not wait
        for the device.
        """
        on = self.attachments
        means = [
            (on[path].memory.of("means"), name, shape)
            for path, site in self.chains.items()
            if on[path].engine.keeps_means
            for name, shape in site.means().items()
        ]
        if means:
            average_means(means, next(p for block in self.blocks.values() for p in block.parameters()))

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._watched = []
        self.detach()
