"""``scan``: a loop over any step function, in the signature of ``torch._higher_order_ops.scan``."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from gradfree.engines.engine import Engine
from gradfree.loops.compiled import Compiler
from gradfree.loops.recurrence import Loop, LoopMemory, Step
from gradfree.registry import resolve_engine
from gradfree.torchside.private import uncompiled

_memories: dict[Hashable, LoopMemory] = {}
_memories_of: WeakKeyDictionary[nn.Module, dict[Hashable, LoopMemory]] = WeakKeyDictionary()


@uncompiled
def scan(
    step: Step,
    init: Any,
    xs: Any,
    *,
    dim: int = 0,
    reverse: bool = False,
    engine: str | Engine = "shooting",
    compile: bool = False,
) -> tuple[Any, Any]:
    """Run ``carry, y = step(carry, x)`` over all x of a sequence; return the last carry, and all y, stacked.

    In place of a Python loop over time, with the same results and gradients to the engine's tolerance. ``step`` is any
    function: tensors that it takes from outside, such as parameters, get their gradients. With ``"shooting"`` the
    sequence is cut into segments that run at once, in both passes, until their borders agree. Steps that cannot run so
    (random numbers, values that are kept outside, branches on values) run one by one, with a warning that says why. The
    first calls are timed, cut and uncut, and the fastest way is kept. The last carry is a copy: where it is returned
    as y, too, the gradient of y is not a part of the copy's.

    Args:
        step: called as ``step(carry, x)`` with the shapes that a loop has. Returns the next carry, of the same
            structure, shapes and dtypes as ``init``, and y.
        init: the initial carry: a tensor, or a tuple, list or dict of tensors and ``None``.
        xs: the inputs, as ``init``; each tensor has T steps along ``dim``.
        dim: the dimension of time, in ``xs`` and in the stacked y; 0 in y that have no such dimension.
        reverse: whether to run from the last step to the first; y are in the order of ``xs`` then, too.
        engine: ``"shooting"``; ``"newton"``; ``"auto"``, the faster of them; ``"backprop"``, the plain loop; or an
            engine object such as ``create_engine("shooting", segments=16)``.
        compile: whether to compile chunks of eight steps by ``torch.compile``, which takes 15 to 60 seconds a shape;
            the step must compile as a whole, without graph breaks.

    Raises:
        TypeError: ``xs`` or y, or with ``compile`` also ``init``, has leaves that are neither tensors nor ``None``; the
            step does not return a pair.
        ValueError: there is no step, the sequences differ in length, or a tensor has no dimension ``dim``; an engine
            that needs recorded chains.
        ChainError: second derivatives of a call that ran in segments; a step that cannot be compiled.
    """
    solver = resolve_engine(engine, {})
    loops = solver.loops
    if loops is None:
        raise ValueError(
            f"scan: {type(solver).__name__} cannot run a step function. Use engine='shooting', 'newton', 'auto' or "
            "'backprop', or put the cell into a gradfree.CellLayer and attach the engine to that."
        )
    if compile and (others := [t for t in tree_leaves(init) if not (t is None or isinstance(t, Tensor))]):
        raise TypeError(
            f"scan: with compile=True init must consist of tensors and None, not {type(others[0]).__name__}. Make it a "
            "tensor, or leave compile=True out."
        )
    leaves, spec = tree_flatten(xs)
    steps = [None if x is None else _by_step(x, dim) for x in leaves]
    lengths = {len(x) for x in steps if x is not None}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"scan: xs must be sequences of one length, at least 1, along dim {dim}, not {lengths or 'none'}."
        )
    steps = [None if x is None else x.flip(0) for x in steps] if reverse else steps
    carry, ys = loops(Loop(step, init, steps, spec, _name(step)), _memory(step, compile), None)
    # As with torch's layers: its gradient is that through itself alone, however the loop ran.
    carry = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, carry)
    if reverse or dim:
        ys = tree_map(lambda y: _in_place_of(y, dim, reverse) if isinstance(y, Tensor) else y, ys)
    return carry, ys


def _by_step(x: Any, dim: int) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"scan: xs must be tensors, or tuples, lists or dicts of tensors and None, not {type(x).__name__}."
        )
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"scan: a tensor of xs has shape {tuple(x.shape)}, and no dim {dim} for time. Each must have all steps "
            "along it; hand what is the same at every step to the step from outside."
        )
    return x.movedim(dim, 0) if dim else x


def _in_place_of(y: Tensor, dim: int, reverse: bool) -> Tensor:
    y = y.flip(0) if reverse else y
    return y.movedim(0, dim) if -y.dim() <= dim < y.dim() else y


def _name(step: Any) -> str:
    return f"scan of {getattr(step, '__qualname__', type(step).__name__)}"


def _memory(step: Any, compile: bool) -> LoopMemory:
    """Return what calls of this function, method or module have learnt.

    Programs make closures anew in every pass: functions are known by their code and that of functions in their closure.
    """
    while isinstance(step, partial):
        step = step.func
    owner, function = (step.__self__, step.__func__) if isinstance(step, MethodType) else (step, step)
    known = _memories_of.setdefault(owner, {}) if isinstance(owner, nn.Module) else _memories
    key = _code(owner), _code(function), compile
    if key not in known:
        known[key] = LoopMemory(compiler=Compiler() if compile else None)
    return known[key]


def _code(value: Any, depth: int = 3) -> Hashable:
    if isinstance(value, FunctionType):
        cells = (cell.cell_contents for cell in value.__closure__ or () if depth and _is_set(cell))
        return value.__code__, *(_code(inner, depth - 1) for inner in cells)
    # What cannot be cut in training, as dropout, may be cut in evaluation.
    return value if isinstance(value, type) else (type(value), isinstance(value, nn.Module) and value.training)


def _is_set(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:  # Not assigned yet.
        return False
