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
        chosen: which part of the state the elements are, if not all of it: dimension, start and length.
    """

    moved: Tensor | None
    whole: torch.Size
    device: torch.device
    back: _Lift | None = None
    chosen: tuple[int, int, int] | None = None

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
            return (self.chosen,)
        return self.places.shape, self.places.stride(), self.places.storage_offset(), self.chosen

    def lift(self, factor: Factor) -> Factor:
        """Return a factor of the tensor's elements as one of the output's."""
        if not isinstance(factor, Tensor):
            return factor
        if self.chosen is not None:
            dim, start, length = self.chosen
            dim -= self.places.dim()
            # Of all elements, unless it broadcasts there.
            if factor.dim() >= -dim and factor.shape[dim] > 1:
                factor = factor.narrow(dim, start, length)
        if self.back is None:
            return factor
        if factor.device != self.device:
            # A Python number, which autograd keeps on the CPU: nothing waits for the device to read it.
            factor = torch.full((), factor.item(), dtype=factor.dtype, device=self.device)
        return self.back(factor)

    def end(self) -> Factor:
        """Return the factor of a tensor that is the state, or a part of it: 1 where its elements have come back."""
        if self.moved is None and self.chosen is None:
            return 1.0
        at = torch.empty(self.whole, device="meta")
        if self.chosen is not None:
            at = at.narrow(*self.chosen)
        mine = (self.places.shape, self.places.stride(), self.places.storage_offset())
        if mine != (at.shape, at.stride(), at.storage_offset()):
            return 0.0
        return 1.0 if self.chosen is None else self.lift(torch.ones((), device=self.device))

    def viewed(self, change: Callable[[Tensor], Tensor], back: _Lift) -> Layout | None:
        """Return the layout of what this tensor is a changed view of; ``None`` if its elements are not in a raster.

        Args:
            change: undoes the view.
            back: does it again, of a tensor of the shape before it.
        """
        if self.chosen is not None:
            return None
        try:
            places = change(self.places)
        except RuntimeError:
            return None
        shape, outer = places.shape, self.back

        def lift(factor: Tensor) -> Tensor:
            here = back(factor.expand(shape))
            return here if outer is None else outer(here)

        return Layout(places, self.whole, self.device, lift)

    def part(self, dim: int, start: int, length: int) -> Layout | None:
        """Return the layout of a part of this tensor, one of those that it was put together from."""
        if self.chosen is not None:
            return None
        shape, outer = self.places.shape, self.back

        def lift(factor: Tensor) -> Tensor:
            own = [*shape[:dim], length, *shape[dim + 1 :]]
            here = factor.new_zeros(shape)
            here.narrow(dim, start, length).copy_(factor.expand(own))
            return here if outer is None else outer(here)

        return Layout(self.places.narrow(dim, start, length), self.whole, self.device, lift)
