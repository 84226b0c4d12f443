"""What is in hand while an engine is attached to a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.chains.bypass import BypassWatch
from gradfree.chains.chain import Solver
from gradfree.chains.memory import KeptMean, average_means
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.chains.survey import LinkFindings


class Handle:
    """An engine attached to a model; :meth:`detach`, or the end of its ``with`` block, restores the model.

    Attributes:
        chains: the chains by module path.
    """

    def __init__(
        self,
        parts: Sequence[Removable] = (),
        chains: Mapping[str, Site] | None = None,
        attachments: Mapping[str, Attachment] | None = None,
        means: Sequence[KeptMean] = (),
        watch: BypassWatch | None = None,
    ):
        self._parts = parts
        self.chains = chains or {}
        self._attachments = attachments or {}
        self._means = means
        self._watch = watch

    @property
    def attached(self) -> bool:
        """Whether the engine is on the model."""
        return bool(self._parts)

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The modules whose parameters the chains train, by module path."""
        return {path: block for site in self.chains.values() for path, block in site.blocks.items()}

    def take_over(self, other: Handle) -> None:
        """Have in hand what ``other`` has, which goes on without; nothing may be in hand before."""
        self.chains = other.chains
        self._parts, self._attachments, self._means = other._parts, other._attachments, other._means
        self._watch, other._parts, other._watch = other._watch, [], None

    def compare(self, on: bool) -> None:
        """Have passes from now on compare the engine's gradients with backpropagation's, and get those; or not."""
        for attachment in self._attachments.values():
            attachment.differences = [] if on else None

    def compared(self) -> Tensor | None:
        """Return what passes have compared since the last call; ``None`` if none has.

        Returns:
            g · g*, ‖g‖² and ‖g*‖² of the chains' parameters, g the engine's gradients and g* the exact ones.
        """
        found: list[Tensor] = []
        for attachment in self._attachments.values():
            found += attachment.differences or []
            if attachment.differences is not None:
                attachment.differences = []
        return torch.stack([pair.to(found[0]) for pair in found]).sum(0) if found else None

    def sharpen(self) -> Solver | None:
        """Let the engine go on with its next better options; return it, or ``None`` if it has none."""
        better = {attachment: attachment.engine.sharper for attachment in self._attachments.values()}
        if not better or None in better.values():
            return None
        for attachment, engine in better.items():
            assert engine is not None
            attachment.engine = engine
        return next(iter(better.values()))

    def use_exact_gradients(self) -> None:
        """Let backpropagation solve the chains in the engine's place from now on."""
        for attachment in self._attachments.values():
            attachment.use_exact = True

    def detach(self) -> None:
        """Take the engine off; a second call does nothing. Graphs recorded before keep the engine.

        Warns of what :meth:`watch` does.
        """
        self.watch()
        self._watch = None
        for part in self._parts:
            part.remove()
        self._parts = []

    def watch(self) -> None:
        """Warn, once, if parameters of a chain have got gradients that the engine never computed.

        A model that runs layers of a block by themselves bypasses the engine: their gradients are autograd's own.
        ``EngineOptimizer`` and Lightning's strategies look behind each step; costs nothing once every block's
        gradients have come from the engine.
        """
        if self._watch is not None:
            self._watch.check()

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Let backpropagation solve this handle's chains in the backward passes inside the block, not the engine."""
        with self._setting("use_exact", True):
            yield

    @contextmanager
    def uncompared(self) -> Iterator[None]:
        """Have backward passes inside the block get the engine's gradients, also where passes are being compared."""
        with self._setting("differences", None):
            yield

    @contextmanager
    def collecting(self) -> Iterator[dict[str, Tensor]]:
        """Collect δ in the backward passes inside the block: of the state behind each block, by the block's path.

        Of a recurrent layer, of all its steps, by its name in figures. A block that runs several times has the last.
        """
        found: dict[str, Tensor] = {}
        with self._setting("deltas", found):
            yield found

    @contextmanager
    def _setting(self, attribute: str, value: object) -> Iterator[None]:
        before = {attachment: getattr(attachment, attribute) for attachment in self._attachments.values()}
        for attachment in before:
            setattr(attachment, attribute, value)
        try:
            yield
        finally:
            for attachment, its in before.items():
                setattr(attachment, attribute, its)

    @contextmanager
    def surveying(self) -> Iterator[dict[str, list[Sequence[LinkFindings]]]]:
        """Survey the chains that the engine solves inside the block: what is yielded fills, by path, in their order."""
        found: dict[str, list[Sequence[LinkFindings]]] = {path: [] for path in self._attachments}
        with self._setting("surveys", None):
            for path, attachment in self._attachments.items():
                attachment.surveys = found[path]
            yield found

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return what the engine keeps of each chain from pass to pass, by module path; empty for most engines."""
        kept = {path: attachment.memory.state_dict() for path, attachment in self._attachments.items()}
        return {path: state for path, state in kept.items() if state}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take up where another run left off.

        Raises:
            ValueError: a chain that this handle does not have; nothing is loaded then.
        """
        if unknown := state.keys() - self._attachments.keys():
            raise ValueError(
                f"no chains {sorted(unknown)} here; there are {sorted(self._attachments)}. Attach the engine that the "
                "state was saved of, to the same chains, or load only the model's weights."
            )
        for path, attachment in self._attachments.items():
            attachment.memory.load_state_dict(state.get(path, {}))

    def average_over_ranks(self) -> None:
        """Replace the running means that the engine keeps by those over all ranks of ``torch.distributed``.

        For data parallel training, behind each step of the optimizer and on every rank: each batch moves the means of
        its own rank. Lightning's strategies do it. The group must be there; nothing waits for the device.
        """
        if self._means:
            average_means(self._means, next(p for block in self.blocks.values() for p in block.parameters()))

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._watch = None
        self.detach()
