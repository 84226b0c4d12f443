"""Places of chains in depth whose blocks may be a row."""

from __future__ import annotations

from gradfree.chains.site import Removable
from gradfree.chains.solving import Attachment
from gradfree.depth.depth_site import Container
from gradfree.depth.recorder import RecordedChain
from gradfree.rows.row import SequentialRow
from gradfree.torchside.unsaved import Unsaved


class RowContainer(Container):
    """A container whose blocks run backward in one batch if they are equal and a plain ``nn.Sequential`` runs them."""

    @property
    def can_be_batched(self) -> bool:
        """Whether a plain ``nn.Sequential`` runs the blocks; whether they are equal is checked in each pass."""
        return SequentialRow.fits(self._container, list(self.blocks.values()))

    def record(self, attachment: Attachment) -> list[Removable]:
        """Put the recorder's hooks on the blocks, and the forward of a row on their container if they may be one."""
        chain = RecordedChain(attachment, self)
        handles = chain.record()
        if attachment.batched and attachment.engine.pulls_at_once and self.can_be_batched:
            handles += [SequentialRow(chain, self._container), Unsaved(self._container, {"forward"})]
        return handles
