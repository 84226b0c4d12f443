"""A step function with its initial carry and its inputs, and the plain loop over it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

Step = Callable[[Any, Any], tuple[Any, Any]]
"""Maps a carry and the inputs of one step to the next carry and the outputs of the step."""

LeafStep = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]
"""A step on the tensors among the leaves of its trees."""

Leaves = list[Any]
"""The leaves of a pytree: tensors, and ``None`` for leaves that are none."""

_DEEPEST = 8
"""A carry or y that is nested deeper has a container more with each step."""

_OTHER_STRUCTURE = (
    "{name} returns {what} of another structure at some steps. Return the same tuples, lists, dicts and None at every "
    "step, and the keys of a dict in the same order."
)


@dataclass(frozen=True)
class Loop:
    """c_t, y_t = step(c_{t-1}, x_t), t = 1..T, before it runs.

    Attributes:
        step: the function.
        init: the initial carry, a pytree.
        xs: the leaves of the inputs, (T, ...) each, or ``None``.
        spec: the structure of the inputs of a step.
        name: of the step, for messages.
    """

    step: Step
    init: Any
    xs: Leaves
    spec: TreeSpec
    name: str

    @property
    def length(self) -> int:
        """T."""
        return next(len(x) for x in self.xs if x is not None)

    def inputs(self) -> list[Any]:
        """Return the inputs of each step."""
        if self.spec.is_leaf():
            return list(self.xs[0].unbind())
        steps = [[None] * self.length if x is None else x.unbind() for x in self.xs]
        return list(map(builder(self.spec), zip(*steps, strict=True)))

    def call(self, carry: Any, x: Any) -> Any:
        """Return the next carry and the output of one step.

        Raises:
            TypeError: the step returns something else, such as a tensor, which Python would split by its rows.
        """
        carry, y = self._pair(self.step(in_new_containers(carry), x))
        return carry, in_new_containers(y)

    def _pair(self, found: Any) -> Any:
        if not isinstance(found, tuple | list) or len(found) != 2:
            what = f"{len(found)} values" if isinstance(found, tuple | list) else f"a {type(found).__name__}"
            raise TypeError(
                f"{self.name}: the step must return two values, the next carry and y, not {what}. Several tensors of "
                "either go in a tuple, list or dict; a step without outputs returns None as y."
            )
        return found

    def run(self, inputs: Iterable[Any] | None = None, carry: Any = None, outputs: Sequence[Any] = ()) -> Any:
        """Run the loop; return the final carry, and the outputs of all steps, stacked.

        Args:
            inputs: those of the steps that are left to run; ``None``: all, from the initial carry.
            carry: the carry before these steps.
            outputs: those of the earlier steps.

        Raises:
            TypeError: the step returns a carry or outputs that no loop over it can have.
        """
        inputs, carry = (self.inputs(), self.init) if inputs is None else (inputs, carry)
        ys, step, is_tensor = list(outputs), self.step, isinstance(self.init, Tensor)
        for x in inputs:
            found = step(in_new_containers(carry), x)
            # Most steps return a tuple; a call for each would cost as much as a small operation.
            carry, y = found if type(found) is tuple and len(found) == 2 else self._pair(found)
            if is_tensor and not isinstance(carry, Tensor):
                raise TypeError(
                    f"{self.name}: the step returns a {type(carry).__name__} as the next carry, but init is one "
                    "tensor. Both must have the same structure. A step returns a pair, the next carry and y."
                )
            ys.append(in_new_containers(y))
        return carry, stacked(ys, self.name)


@dataclass
class LoopMemory:
    """What the calls of one step function have learnt; it changes how they run, never their results.

    Attributes:
        tensors: those that are saved in checkpoints; ``None``: none are.
        compiler: compiles chunks of steps, a :class:`~gradfree.loops.compiled.Compiler`; ``None``: nothing is compiled.
        known: all else, as the engine needs.
    """

    tensors: dict[str, Tensor] | None = None
    compiler: Any = None
    known: Any = None


Runner = Callable[[Loop, LoopMemory, "nn.Module | None"], tuple[Any, Any]]
"""Runs a loop, given what earlier calls have learnt, and the module whose buffers are scratch, if there is one."""


def leaf_step(loop: Loop, carry: Structure, y: Structure) -> LeafStep:
    """Return the step of ``loop`` on the tensors of its carry, inputs and outputs."""
    build_carry, build_x = carry.build, Structure(loop.spec, [n for n, x in enumerate(loop.xs) if x is not None]).build
    name, step = loop.name, loop.step

    def run(parts: Sequence[Tensor], x: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        after, out = step(build_carry(parts), build_x(x))
        return carry.tensors(after, name), y.tensors(out, name)

    return run


@dataclass(frozen=True)
class Structure:
    """A pytree without its tensors.

    Attributes:
        spec: the structure.
        at: which of its leaves are tensors; the others are ``None``.
    """

    spec: TreeSpec
    at: list[int]

    @staticmethod
    def of(tree: Any) -> tuple[Structure, list[Tensor]]:
        """Return the structure of ``tree`` and its tensors."""
        leaves, spec = tree_flatten(tree)
        at = [n for n, t in enumerate(leaves) if t is not None]
        return Structure(spec, at), [leaves[n] for n in at]

    def tensors(self, tree: Any, name: str) -> list[Tensor]:
        """Return the tensors of a tree that must have this structure.

        Raises:
            TypeError: it has another one.
        """
        if isinstance(tree, Tensor) and self.spec.is_leaf() and self.at:
            return [tree]
        leaves, spec = tree_flatten(tree)
        # What torch traces has been compared step by step before.
        is_same = torch.compiler.is_compiling() or spec == self.spec
        if not is_same or [n for n, t in enumerate(leaves) if t is not None] != self.at:
            raise TypeError(_OTHER_STRUCTURE.format(name=name, what="a carry or a y"))
        return [leaves[n] for n in self.at]

    @property
    def build(self) -> Callable[[Sequence[Any]], Any]:
        """A function that puts tensors into the structure."""
        return filled(self.spec, self.at)


def builder(spec: TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """Return a function that puts leaves into the structure ``spec``."""
    return (lambda leaves: leaves[0]) if spec.is_leaf() else lambda leaves: tree_unflatten(leaves, spec)


def stacked(ys: Sequence[Any], name: str) -> Any:
    """Stack the outputs of all steps, leaf by leaf.

    Raises:
        TypeError: a leaf is neither a tensor nor ``None``, or the steps return different structures or shapes.
    """
    if all(isinstance(y, Tensor) for y in ys):
        return _stacked_leaf(ys, name)
    refuse_other_outputs(ys[0], name)
    leaves, specs = zip(*map(tree_flatten, ys), strict=True)
    # The values of None are a part of it: what one step has none of cannot be stacked.
    kinds = [[t is None for t in of_step] for of_step in leaves]
    if any(spec != specs[0] for spec in specs) or any(kind != kinds[0] for kind in kinds):
        raise TypeError(_OTHER_STRUCTURE.format(name=name, what="a y"))
    parts = [None if part[0] is None else _stacked_leaf(part, name) for part in zip(*leaves, strict=True)]
    return builder(specs[0])(parts)


def _stacked_leaf(ys: Sequence[Tensor], name: str) -> Tensor:
    try:
        return torch.stack(list(ys))
    except (RuntimeError, TypeError) as error:
        for y in ys:
            refuse_other_outputs(y, name)
        first, other = ys[0].shape, next((y.shape for y in ys if y.shape != ys[0].shape), None)
        if other is None:
            raise
        raise TypeError(
            f"{name} returns a y of shape {tuple(first)} at the first step and of {tuple(other)} at another. All steps "
            "must return the same."
        ) from error


def in_new_containers(tree: Any, depth: int = 0) -> Any:
    """Return the same leaves in other tuples, lists and dicts, each of its own: a step may write to what it returns.

    Raises:
        TypeError: they are nested deeper and deeper, which may take exponential time.
    """
    if isinstance(tree, Tensor) or tree is None:
        return tree
    if depth > _DEEPEST:
        raise TypeError(
            f"a step returns a carry or a y that is nested more than {_DEEPEST} deep. Return the same tuples, lists, "
            "dicts and None at every step."
        )
    # For most steps many times as fast as ``tree_map``: there is one call for each step of a loop.
    kind = type(tree)
    if kind is dict or kind is OrderedDict:
        new = kind()
        for key, part in tree.items():
            new[key] = part if isinstance(part, Tensor) else in_new_containers(part, depth + 1)
        return new
    if kind is tuple or kind is list or hasattr(kind, "_make"):
        parts = [part if isinstance(part, Tensor) else in_new_containers(part, depth + 1) for part in tree]
        return kind(parts) if kind is tuple or kind is list else tree._make(parts)
    return tree_map(lambda leaf: leaf, tree)


def refuse_other_outputs(y: Any, name: str) -> None:
    """Raise TypeError if a leaf of the outputs of a step is neither a tensor nor ``None``."""
    for leaf in tree_leaves(y):
        if leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(
                f"{name} returns {type(leaf).__name__} in y, which cannot be stacked over the steps. y must be a "
                "tensor, or a tuple, list or dict of tensors and None."
            )


def filled(spec: TreeSpec, at: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    """Return a function that puts tensors into ``spec``, at the leaves ``at``; the other leaves are ``None``."""
    build, count = builder(spec), spec.num_leaves
    if len(at) == count:
        return build

    def fill(tensors: Sequence[Any]) -> Any:
        leaves: Leaves = [None] * count
        for n, t in zip(at, tensors, strict=True):
            leaves[n] = t
        return build(leaves)

    return fill
