"""A step function with its initial carry and its inputs, and the plain loop over it."""

from __future__ import annotations

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
        carry, ys, step = in_new_containers(carry), list(outputs), self.step
        for x in inputs:
            found = step(carry, x)
            # Most steps return a tuple; a call for each would cost as much as a small operation.
            carry, y = found if type(found) is tuple and len(found) == 2 else self._pair(found)
            ys.append(in_new_containers(y))
        if isinstance(self.init, Tensor) and not isinstance(carry, Tensor):
            raise TypeError(
                f"{self.name}: the step returns a {type(carry).__name__} as the next carry, but init is one tensor. "
                "Both must have the same structure. A step returns a pair, the next carry and y."
            )
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
    carry_at, y_at, name, step = carry.at, y.at, loop.name, loop.step

    def run(carry: Sequence[Tensor], x: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        after, y = step(build_carry(carry), build_x(x))
        return tensors_at(after, carry_at, name), tensors_at(y, y_at, name)

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
    first, spec = tree_flatten(ys[0])
    leaves = [tree_leaves(y) for y in ys]
    if any(len(of_step) != len(first) for of_step in leaves):
        raise TypeError(f"{name} returns a y of another structure at some steps. Return the same at every step.")
    parts = [None if part[0] is None else _stacked_leaf(part, name) for part in zip(*leaves, strict=True)]
    return builder(spec)(parts)


def _stacked_leaf(ys: Sequence[Tensor], name: str) -> Tensor:
    try:
        return torch.stack(list(ys))
    except RuntimeError as error:
        first, other = ys[0].shape, next((y.shape for y in ys if y.shape != ys[0].shape), None)
        if other is None:
            raise
        raise TypeError(
            f"{name} returns a y of shape {tuple(first)} at the first step and of {tuple(other)} at another. All steps "
            "must return the same."
        ) from error


def in_new_containers(tree: Any, made: dict[int, Any] | None = None) -> Any:
    """Return the same leaves in other tuples, lists and dicts: a step may write to those that it returns.

    ``made`` has those made so far: what a step nests by mistake may contain one container a million times.
    """
    if isinstance(tree, Tensor) or tree is None:
        return tree
    if torch.compiler.is_compiling():
        return tree_map(lambda leaf: leaf, tree)  # Torch 2.11 cannot trace id().
    made = {} if made is None else made
    if id(tree) not in made:
        # For most steps many times as fast as ``tree_map``.
        if type(tree) is tuple or type(tree) is list:
            new: Any = type(tree)([in_new_containers(part, made) for part in tree])
        elif type(tree) is dict:
            new = {key: in_new_containers(part, made) for key, part in tree.items()}
        else:
            new = tree_map(lambda leaf: leaf, tree)
        made[id(tree)] = new
    return made[id(tree)]


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


def tensors_at(tree: Any, at: Sequence[int], name: str) -> list[Tensor]:
    """Return the leaves ``at`` of a tree, which must be its only tensors."""
    if isinstance(tree, Tensor) and len(at) == 1:
        return [tree]
    leaves = tree_leaves(tree)
    if [n for n, t in enumerate(leaves) if t is not None] != list(at):
        raise TypeError(
            f"{name} returns a carry or a y of another structure at some steps. Return the same tuples, lists, dicts "
            "and None at every step."
        )
    return [leaves[n] for n in at]
