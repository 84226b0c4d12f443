"""The first step of a loop, watched: which tensors it takes from outside, and why it may not run in segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from gradfree.loops.compiled import nothing_compiled
from gradfree.loops.recurrence import Loop, builder, refuse_other_outputs
from gradfree.scans.fused_cells import FORMULAS
from gradfree.torchside.graph import walk
from gradfree.torchside.private import (
    as_written,
    next_sequence_number,
    saves_elsewhere,
    sequence_number,
    transforms_active,
    version,
)
from gradfree.torchside.surroundings import Surroundings
from gradfree.torchside.under_vmap import wrong_under_vmap

_OBSERVES = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "grad")
_ASKS = {getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")}
"""Getters with other answers inside ``torch.func.vmap``. A step that puts hooks on its carry asks before: at the first
step the carry may need no gradient."""

NO_WARNING = "engine='backprop' is the plain loop without this warning."
_KEPT = (
    "Return what the step keeps as a part of y or of the carry: then steps run at once. A CellLayer whose buffers and "
    f"tensor attributes carry nothing from step to step takes scratch=True. {NO_WARNING}"
)
OTHER_ENTRIES = "has a carry with entries that are neither tensors nor None"


@dataclass
class FirstStep:
    """The result of the first step of a loop, with the graph that the loop has.

    Attributes:
        carry: after the step.
        y: the step's outputs.
        problem: why the steps must run one by one, in words that follow "the step"; ``None`` if they need not.
        leaves: the leaf tensors that need a gradient and that the step takes from outside.
        reached: the ids of those that the step's results depend on.
        inner: the other tensors that need a gradient and that it takes from outside.
        has_fused_cells: whether it calls one of :data:`~gradfree.scans.fused_cells.FORMULAS`.
        may_be_cache: whether the problem is a change outside of the step, which may have filled a cache once for all.
        surroundings: what the step could change outside of it, as it was afterwards.
        remedy: what to do about the problem.
    """

    carry: Any
    y: Any
    problem: str | None
    leaves: list[Tensor]
    reached: set[int]
    inner: list[Tensor]
    has_fused_cells: bool
    may_be_cache: bool
    surroundings: Surroundings
    remedy: str


class _Watch(TorchFunctionMode):
    """Notes the tensors that functions of torch take, and calls that only make sense step by step."""

    def __init__(self, given: list[Tensor]):
        super().__init__()
        self.given = {id(t) for t in given}
        self._start = next_sequence_number()
        self.kept: dict[int, tuple[Tensor, int, bool]] = {}
        self.problem: str | None = None
        self.has_fused_cells = False
        self._saves_elsewhere = saves_elsewhere()
        for t in given:
            self.kept[id(t)] = t, version(t), True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if transforms_active():
            self.problem = "runs a transform of torch.func"
            return func(*args, **kwargs)
        if saves_elsewhere() and not self._saves_elsewhere:
            self.problem = "has a checkpoint inside, or other hooks for saved tensors"
        self.note((args, kwargs))
        name = getattr(func, "__name__", "")
        if name in _OBSERVES:
            self.problem = f"calls {name} on a tensor"
        elif wrong := wrong_under_vmap(func, args, kwargs, self._is_from_outside):
            self.problem = f"calls {wrong}, which torch.func.vmap computes wrongly; another function may run at once"
        elif func in FORMULAS:
            self.has_fused_cells = True
        if func in _ASKS and not self._is_from_outside(args[0]):
            self.problem = "asks whether a tensor needs a gradient"
        found = func(*args, **kwargs)
        for t in _tensors(found):
            self.kept.setdefault(id(t), (t, 0, False))
        return found

    def note(self, tree: Any) -> None:
        """Note the tensors in ``tree``, as far as they are not known yet."""
        for t in _tensors(tree):
            if id(t) not in self.kept:
                self.kept[id(t)] = t, version(t), t.grad_fn is None or sequence_number(t.grad_fn) < self._start

    def _is_from_outside(self, t: Tensor) -> bool:
        """Return whether ``t`` is neither given to the step nor made by it."""
        return self.kept[id(t)][2] and id(t) not in self.given

    def outside(self) -> list[Tensor]:
        """Return the tensors from outside, and those given."""
        return [t for t, _, from_outside in self.kept.values() if from_outside]

    def was_changed(self) -> bool:
        """Return whether a tensor from outside was changed in place."""
        return any(from_outside and version(t) != before for t, before, from_outside in self.kept.values())


def run_first_step(loop: Loop, scratch: bool) -> FirstStep:
    """Run the first step as the loop does.

    Args:
        loop: the loop.
        scratch: whether buffers of modules are only written to, so that they carry nothing from step to step.

    Raises:
        TypeError: y has leaves that are neither tensors nor ``None``.
    """
    x = builder(loop.spec)([each if each is None else each[0] for each in loop.xs])
    # Views: the step may use the initial carry from outside, too.
    init = tree_map(lambda t: t.view_as(t) if isinstance(t, Tensor) and t.requires_grad else t, loop.init)
    given = [t for t in tree_leaves((init, x)) if isinstance(t, Tensor)]
    before = Surroundings(loop.step, not scratch)
    with nothing_compiled(), as_written(), _Watch(given) as watch:
        carry, y = loop.call(init, x)
    refuse_other_outputs(y, loop.name)
    # What the step returns as it is, no function takes.
    watch.note(tree_leaves((carry, y)))
    after = Surroundings(loop.step, not scratch)
    change = after.change(before)
    problem = watch.problem or change
    may_be_cache = change is not None and problem is change
    if problem is None and watch.was_changed():
        problem = "changes a tensor in place that it has not made itself; make a new one"
    if problem is None and before.scripted is not None:
        problem = (
            f"may call {before.scripted or 'a module'}, whose graph torch.func.vmap loses: TorchScript has compiled it"
        )
    problem = problem or _shape_problem(init, carry)
    needed = [t for t in watch.outside() if t.requires_grad and id(t) not in watch.given]
    inner = [t for t in needed if not t.is_leaf]
    made = [t for t in tree_leaves((carry, y)) if isinstance(t, Tensor)]
    stops = {t.grad_fn for t in (*inner, *given) if t.grad_fn is not None}
    known = {id(t) for t in given}
    # Includes what a function of torch.autograd.Function takes, which no mode sees.
    reached = {id(leaf): leaf for leaf in walk(made, stops).leaves if id(leaf) not in known}
    leaves = reached | {id(t): t for t in needed if t.is_leaf}
    fused, remedy = watch.has_fused_cells, _KEPT if may_be_cache else NO_WARNING
    return FirstStep(carry, y, problem, list(leaves.values()), set(reached), inner, fused, may_be_cache, after, remedy)


def _shape_problem(init: Any, carry: Any) -> str | None:
    (before, spec), (after, other) = tree_flatten(init), tree_flatten(carry)
    if spec != other:
        return "returns a carry of another structure than it takes; the order of a dict's keys counts"
    for old, new in zip(before, after, strict=True):
        if old is None and new is None:
            continue
        if old is None or new is None:
            return "returns None in place of a part of its carry, or a part in place of None"
        if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
            return OTHER_ENTRIES
        if old.shape != new.shape:
            return f"returns a carry of shape {tuple(new.shape)} in place of {tuple(old.shape)}; expand init"
        if old.dtype != new.dtype or old.device != new.device:
            return f"returns a carry of {new.dtype} on {new.device} in place of {old.dtype} on {old.device}"
    return None


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _tensors(each)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


class Replacing(TorchFunctionMode):
    """Puts tensors in place of others, and formulas in place of torch's fused cells.

    Args:
        others: the tensors to put in place, by the id of those that are replaced.
    """

    def __init__(self, others: dict[int, Tensor]):
        super().__init__()
        self.others = others

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.others:
            args, kwargs = self._replace(args), self._replace(kwargs or {})
        formula: Callable[..., Any] = FORMULAS.get(func, func)
        return formula(*args, **(kwargs or {}))

    def _replace(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self.others.get(id(tree), tree)
        if not isinstance(tree, (tuple, list, dict)):
            return tree
        before = list(tree.values()) if isinstance(tree, dict) else tree
        after = [self._replace(value) for value in before]
        if all(map(is_, before, after)):
            return tree
        if isinstance(tree, dict):
            return dict(zip(tree, after, strict=True))
        # Named tuples are made from separate values.
        return getattr(type(tree), "_make", type(tree))(after)
