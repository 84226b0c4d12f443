"""Where the elements of a tensor inside a block are in the block's output: changes of shape and order, undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Factor

_Lift = Callable[[Tensor], Tensor]


class Layout(NamedTuple):
    """A view of the block's output that has the elements of a tensor in it.

    Attributes:
        moved: of the tensor's shape; its strides and its offset are where in the output each of its elements is. On
            the meta device: nothing is computed. ``None``: the tensor is the output.
        whole: the shape of the block's output.
        device: of the output.
        back: turns what broadcasts to the tensor's shape into what broadcasts to the output's, if they differ.
    """

    moved: Tensor | None
    whole: torch.Size
    device: torch.device
    back: _Lift | None = None

    @classmethod
    def of(cls, out: Tensor) -> Layout:
        """Return the layout of the output itself."""
        return cls(None, out.shape, out.device)

    @property
    def places(self) -> Tensor:
        """Return where the elements are, also of the output itself."""
        return torch.empty(self.whole, device="meta") if self.moved is None else self.moved

    @property
    def key(self) -> tuple[Any, ...]:
        """What distinguishes layouts."""
        if self.moved is None:
            return ()
        return self.places.shape, self.places.stride(), self.places.storage_offset()

    def lift(self, factor: Factor) -> Factor:
        """Return a factor of the tensor's elements as one of the output's."""
        if not isinstance(factor, Tensor):
            return factor
        if self.back is None:
            return factor
        if factor.device != self.device:
            # A Python number, which autograd keeps on the CPU: nothing waits for the device to read it.
            factor = torch.full((), factor.item(), dtype=factor.dtype, device=self.device)
        return self.back(factor)

    def end(self) -> Factor:
        """Return the factor of a tensor that is the state: 1 where its elements have come back."""
        if self.moved is None:
            return 1.0
        whole = torch.empty(self.whole, device="meta")
        return 1.0 if self.key == (whole.shape, whole.stride(), whole.storage_offset()) else 0.0

    def viewed(self, change: Callable[[Tensor], Tensor], back: _Lift) -> Layout | None:
        """Return the layout of what this tensor is a changed view of; ``None`` if its elements are not in a raster.

        Args:
            change: undoes the view.
            back: does it again, of a tensor of the shape before it.
        """
        try:
            places = change(self.places)
        except RuntimeError:
            return None
        shape, outer = places.shape, self.back

        def lift(factor: Tensor) -> Tensor:
            here = back(factor.expand(shape))
            return here if outer is None else outer(here)

        return Layout(places, self.whole, self.device, lift)
