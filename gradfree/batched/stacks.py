"""The parameters of modules that are alike, stacked, in a graph: a gradient of a stack is handed on to each of them.

Autograd does that itself, and in less time than a function with all the parameters for its inputs takes to be called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent


class Stack(NamedTuple):
    """One parameter of each of N modules.

    Attributes:
        number: its place among all.
        stacked: the parameters, (N, ...), with a graph that leads to them.
    """

    number: int
    stacked: Tensor


class Stacks:
    """The trained parameters of groups of modules that are alike.

    Args:
        groups: for each group its tensors by name, one a module.

    Attributes:
        groups: for each group the stacks of what is trained, by name.
        rows: what each stack leads to, by number.
    """

    def __init__(self, groups: Sequence[Mapping[str, Sequence[Tensor]]]):
        self.groups: list[dict[str, Stack]] = []
        self.rows: list[Sequence[Tensor]] = []
        for group in groups:
            trained = {name: rows for name, rows in group.items() if rows[0].requires_grad}
            numbers = range(len(self.rows), len(self.rows) + len(trained))
            stacks = [torch.stack(list(rows)) for rows in trained.values()]
            self.groups.append(dict(zip(trained, map(Stack, numbers, stacks), strict=True)))
            self.rows += trained.values()

    @property
    def stacks(self) -> list[Tensor]:
        """All stacks, by number."""
        return [column.stacked for group in self.groups for column in group.values()]

    def gradients(self, given: Mapping[int, Cotangent]) -> list[Cotangent]:
        """Return the gradients of the stacks for those of the parameters, by their ids."""
        left = dict(given)
        # A parameter that stands in several rows has its gradient once.
        rows = [[left.pop(id(parameter), None) for parameter in parameters] for parameters in self.rows]
        return [
            None
            if all(g is None for g in row)
            else torch.stack([torch.zeros_like(p) if g is None else g for g, p in zip(row, parameters, strict=True)])
            for row, parameters in zip(rows, self.rows, strict=True)
        ]
