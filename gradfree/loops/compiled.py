"""Chunks of steps that ``torch.compile`` compiles as one function: the start of operations is what costs most."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gradfree.errors import ChainError
from gradfree.loops.agreement import agrees
from gradfree.loops.recurrence import LeafStep, Loop, Structure, leaf_step
from gradfree.torchside.graph import has_custom_functions, walk
from gradfree.torchside.private import (
    hooks_of,
    is_simulated,
    is_traced,
    next_sequence_number,
    other_pass,
    saves_elsewhere,
    sequence_number,
    transforms_active,
    version,
)
from gradfree.torchside.random_state import RandomState
from gradfree.torchside.surroundings import Surroundings

CHUNK = 8
"""Steps a chunk. More take a minute to compile, and are not faster."""


def run_chunk(step: LeafStep, carry: Sequence[Tensor], xs: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Tensor]]:
    """Run the steps of inputs (n, ...); return the carry and the stacked outputs, (n, ...)."""
    ys = []
    for x in zip(*(t.unbind() for t in xs), strict=True):
        carry, y = step(carry, x)
        ys.append(y)
    return carry, [torch.stack(of_leaf) for of_leaf in zip(*ys, strict=True)]


def run_chunk_of_segments(
    step: LeafStep, carry: Sequence[Tensor], xs: Sequence[Tensor]
) -> tuple[Sequence[Tensor], list[Tensor]]:
    """Run the steps of inputs (n, C, ...) in C segments."""

    def run(carry: Sequence[Tensor], xs: Sequence[Tensor]) -> Any:
        return run_chunk(step, carry, xs)

    carry, ys = torch.func.vmap(run, in_dims=(0, 1))(carry, xs)
    # In another dimension torch 2.13 expands the wrong one of what depends on no segment.
    return carry, [y.transpose(0, 1) for y in ys]


_NOT_ANEW = "fail_on_recompile"
"""The stance in which torch raises an error, which names it, in place of compiling anew."""

_OTHER = "torch.compile gives other results or gradients than the step itself, or an error"
_BY_BACKPROP = "With engine='backprop' it may be compiled, without segments"
_IN_SEGMENTS = " in segments", _OTHER, _BY_BACKPROP
_CUSTOM = " in segments", "it calls a torch.autograd.Function, whose gradient torch may lose there", _BY_BACKPROP
_IN_THE_LOOP = "", _OTHER, "Leave compile=True out"
"""Where a chunk runs uncompiled, why, and the remedy."""

Chunk = Callable[[LeafStep, Sequence[Tensor], Sequence[Tensor]], tuple[Sequence[Tensor], list[Tensor]]]
""":func:`run_chunk`, :func:`run_chunk_of_segments`, or one of them compiled."""


class Compiler:
    """Compiles chunks, a function for each set of shapes and each grad mode."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, tuple[Chunk, str]] = {}
        """How chunks run: compiled, or as they are where that is wrong; and torch's stance on compiling them anew."""

    def run(
        self, loop: Loop, chunk: Chunk, step: LeafStep, carry: Sequence[Tensor], xs: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], list[Tensor], Sequence[Tensor]]:
        """Run all steps of ``xs`` in chunks, and those that are left one by one.

        Args:
            loop: the loop that they are of.
            chunk: :func:`run_chunk` or :func:`run_chunk_of_segments`.
            step: the step.
            carry: the carry before the first step.
            xs: inputs, (n, ...).

        Returns:
            The carry, the outputs (n, ...), and the carry before the last chunk.

        Raises:
            ChainError: the step cannot be compiled as a whole, or there is no compiler.
        """
        pieces, before = [], carry
        may_compile = _may_compile([*carry, *xs])
        for begin in range(0, len(xs[0]), CHUNK):
            before, part = carry, [x[begin : begin + CHUNK] for x in xs]
            if may_compile and len(part[0]) == CHUNK:
                carry, ys = self._run_chunk(loop, chunk, step, carry, part)
            else:
                carry, ys = chunk(step, carry, part)
            pieces.append(ys)
        return (
            carry,
            [of_leaf[0] if len(of_leaf) == 1 else torch.cat(of_leaf) for of_leaf in zip(*pieces, strict=True)],
            before,
        )

    def _run_chunk(
        self, loop: Loop, chunk: Chunk, step: LeafStep, carry: Sequence[Tensor], xs: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        given = (*carry, *xs)
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in given)
        kind = given[0].device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (chunk, shapes, autocast, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        run, stance = self._functions.get(key, (None, ""))
        if run is chunk:
            return chunk(step, carry, xs)
        if run is not None:
            try:
                with torch.compiler.set_stance(stance):
                    return run(step, carry, xs)
            except RuntimeError as error:
                if _NOT_ANEW not in str(error):
                    raise
                # Another step of the same code and shapes, or a number in it has changed.
        return self._first_use(key, run, loop, chunk, step, carry, xs)

    def _first_use(
        self,
        key: Hashable,
        run: Chunk | None,
        loop: Loop,
        chunk: Chunk,
        step: LeafStep,
        carry: Sequence[Tensor],
        xs: Sequence[Tensor],
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Run a chunk as it is, and compile it; where that gives other results, it runs as it is from now on, too.

        ``run`` is what is compiled for ``key`` already, for another step; ``None``: nothing is.
        """
        given, before = (*carry, *xs), Surroundings(loop.step)
        random, were_changed = RandomState(given[0].device), _watch(given)
        in_segments, start = chunk is run_chunk_of_segments, next_sequence_number()
        found = chunk(step, carry, xs)
        problem = None
        if were_changed():
            problem = "", "the step changes its carry or its x in place", "Compute new tensors, h = h + x"
        elif in_segments and _calls_custom_function(found, start):
            # torch 2.13 loses their gradients, or names them in an error.
            problem = _CUSTOM
        else:
            run = _compile(chunk, given[0].device, len(self._functions)) if run is None else run
            # Steps in segments keep nothing outside, which is checked before.
            repeats = in_segments or not (random.has_drawn() or Surroundings(loop.step).change(before))
            self._functions[key] = run, _NOT_ANEW if repeats else "default"
            if repeats and not agrees(run, chunk, step, carry, xs):
                problem = _IN_SEGMENTS if in_segments else _IN_THE_LOOP
        if problem is not None:
            self._functions[key] = chunk, "default"
            where, why, remedy = problem
            warnings.warn(f"{loop.name} runs uncompiled{where}: {why}. {remedy}.", stacklevel=2)
        return found


_WATCHED: ContextVar[bool] = ContextVar("watched", default=False)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Run scans inside the ``with`` uncompiled: torch would compile what watches their operations, too."""
    token = _WATCHED.set(True)
    try:
        yield
    finally:
        _WATCHED.reset(token)


def _may_compile(tensors: Sequence[Tensor]) -> bool:
    """Return whether a pass computes values, and gradients by autograd only: what is compiled has no tangents.

    A checkpoint's second run must save what the first one did, which may have been the first use.
    """
    return not (
        _WATCHED.get()
        or saves_elsewhere()
        or transforms_active()
        or is_traced()
        or other_pass()
        or any(map(is_simulated, tensors))
    )


def _calls_custom_function(found: tuple[Sequence[Tensor], list[Tensor]], start: float) -> bool:
    """Return whether what a chunk returns has a node of a custom function, with a number from ``start`` on."""
    carry, ys = found
    return has_custom_functions(type(node) for node in walk([*carry, *ys]).nodes if sequence_number(node) >= start)


def _watch(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """Return a function that returns whether one of the tensors was changed in place since."""
    versions = [version(t) for t in tensors]
    # Those of inference mode have no version.
    copies = [(t, t.clone()) for t in tensors if t.is_inference()]

    def were_changed() -> bool:
        same = (torch.isclose(t, copy, 0, 0, equal_nan=True).all() for t, copy in copies)
        return [version(t) for t in tensors] != versions or not all(same)

    return were_changed


def _compile(chunk: Any, device: torch.device, number: int) -> Chunk:
    _check_compiler(device)
    # Another code object for each, since torch counts recompilations by code.
    code = chunk.__code__.replace(co_name=f"{chunk.__name__}_{number}")
    own = FunctionType(code, chunk.__globals__, code.co_name)
    found: Chunk = torch.compile(own, fullgraph=True, dynamic=False, options=_ON_CPU if device.type == "cpu" else {})
    return found


_ON_CPU: dict[str, Any] = {"cpp_wrapper": True, "max_fusion_size": 1}
"""Most of a chunk's time is Python's on a CPU; on GPUs torch cannot compile backward passes so (issue 178845).

Where torch 2.13 fuses loops on a CPU, one of them may read sums that the other has not finished: ``h[:, order]``,
``gather``, ``sort`` and ``cummax`` get wrong gradients in silence where ``h`` is used twice. Separate loops are one
function in C++ all the same, and as fast, but for steps of a few numbers, which take up to a sixth longer.
"""


def _hooks(tensors: Sequence[Tensor]) -> list[int]:
    return [len(hooks_of(t) or ()) for t in tensors]


def run_plain_loop(loop: Loop, compiler: Compiler | None) -> tuple[Any, Any]:
    """Run ``loop`` step by step or, with a compiler, in compiled chunks; return the final carry and the outputs."""
    if compiler is None or torch.compiler.is_compiling():
        plain: tuple[Any, Any] = loop.run()
        return plain
    return run_compiled(loop, compiler)[0]


def run_compiled(loop: Loop, compiler: Compiler) -> tuple[tuple[Any, Any], Any]:
    """Run ``loop`` in compiled chunks, but for its first steps.

    Returns:
        The final carry and the outputs; the carry after the first steps.

    Raises:
        ChainError: the step cannot be compiled, or it registers hooks on its carry.
    """
    head = (loop.length - 1) % CHUNK + 1
    carry, first_ys = replace(loop, xs=[x if x is None else x[:head] for x in loop.xs]).run()
    if head == loop.length:
        return (carry, first_ys), carry
    (structure, parts), (of_y, early) = Structure.of(carry), Structure.of(first_ys)
    with compiling(loop.name):
        step, xs = leaf_step(loop, structure, of_y), [x[head:] for x in loop.xs if x is not None]
        hooks = _hooks(parts)
        after, late, _ = compiler.run(loop, run_chunk, step, parts, xs)
    if hooks != _hooks(parts) and _may_compile(parts):
        raise ChainError(
            f"{loop.name} registers hooks on its carry, which get other gradients where torch.compile compiles several "
            "steps. Register them on what the step makes of it, or leave compile=True out."
        )
    ys = of_y.build([torch.cat(both) for both in zip(early, late, strict=True)])
    return (structure.build(after), ys), carry


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Compile, and run compiled steps, so that backward passes can be repeated; name the step in errors."""
    from torch._dynamo import config as of_dynamo
    from torch._dynamo import exc
    from torch._functorch import config

    # Hooks of modules inside a cell may change after the first call.
    try:
        with config.patch(donated_buffer=False), of_dynamo.patch(skip_nnmodule_hook_guards=False):
            yield
    except getattr(exc, "FailOnRecompileLimitHit", ()) as error:
        raise ChainError(
            f"{name} is compiled anew too often: torch compiles once for each value of a number, each setting, each "
            "module and each shape of a tensor that the step takes from outside. Make such numbers tensors, pad such "
            "tensors to one shape, or leave compile=True out."
        ) from error
    except exc.TorchDynamoException as error:
        raise ChainError(
            f"{name} cannot be compiled as a whole, and a part of it would not be faster. Leave compile=True out, or "
            f"change the line that torch names: {error}"
        ) from error


def _check_compiler(device: torch.device) -> None:
    """Raise if chunks on ``device`` need a C++ compiler and there is none."""
    if device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise ChainError(
            "compile=True needs a C++ compiler, which torch has not found. Install one (g++, clang++), or leave "
            "compile=True out."
        ) from error
