"""Chunks of steps that ``torch.compile`` compiles as one function: the start of operations is what costs most."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gradfree.errors import ChainError
from gradfree.loops.recurrence import LeafStep, Loop, Structure, leaf_step

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

    return torch.func.vmap(run, in_dims=(0, 1), out_dims=(0, 1))(carry, xs)


class Compiler:
    """Compiles chunks, a function for each set of shapes and each grad mode."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, Callable[..., Any]] = {}

    def run(
        self, chunk: Callable[..., Any], step: LeafStep, carry: Sequence[Tensor], xs: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], list[Tensor], Sequence[Tensor]]:
        """Run all steps of ``xs`` in chunks, and those that are left one by one.

        Args:
            chunk: :func:`run_chunk` or :func:`run_chunk_of_segments`.
            step: the step.
            carry: the carry before the first step.
            xs: inputs, (n, ...).

        Returns:
            The carry, the outputs (n, ...), and the carry before the last chunk.

        Raises:
            ChainError: the step cannot be compiled as a whole, or there is no compiler.
        """
        pieces, before, length = [], carry, len(xs[0])
        for begin in range(0, length, CHUNK):
            part = [x[begin : begin + CHUNK] for x in xs]
            before = carry
            carry, ys = (self._compiled(chunk, carry, part) if len(part[0]) == CHUNK else chunk)(step, carry, part)
            pieces.append(ys)
        return (
            carry,
            [of_leaf[0] if len(of_leaf) == 1 else torch.cat(of_leaf) for of_leaf in zip(*pieces, strict=True)],
            before,
        )

    def _compiled(self, chunk: Any, carry: Sequence[Tensor], xs: Sequence[Tensor]) -> Callable[..., Any]:
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in (*carry, *xs))
        key = (chunk, shapes, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if key not in self._functions:
            _check_compiler(carry[0].device)
            # Another code object for each, since torch counts recompilations by code.
            code = chunk.__code__.replace(co_name=f"{chunk.__name__}_{len(self._functions)}")
            own = FunctionType(code, chunk.__globals__, code.co_name)
            self._functions[key] = torch.compile(own, fullgraph=True, dynamic=False)
        return self._functions[key]


def run_every_step(loop: Loop, compiler: Compiler | None) -> tuple[Any, Any]:
    """Run ``loop`` step by step or, with a compiler, in compiled chunks; return the final carry and the outputs."""
    found: tuple[Any, Any] = loop.run() if compiler is None else run_compiled(loop, compiler)[0]
    return found


def run_compiled(loop: Loop, compiler: Compiler) -> tuple[tuple[Any, Any], Any]:
    """Run ``loop`` in compiled chunks, but for its first steps.

    Returns:
        The final carry and the outputs; the carry after the first steps.
    """
    head = (loop.length - 1) % CHUNK + 1
    carry, first = replace(loop, xs=[x if x is None else x[:head] for x in loop.xs]).run()
    if head == loop.length:
        return (carry, first), carry
    (structure, parts), (of_y, early) = Structure.of(carry), Structure.of(first)
    with compiling(loop.name):
        step, xs = leaf_step(loop, structure, of_y), [x[head:] for x in loop.xs if x is not None]
        after, late, _ = compiler.run(run_chunk, step, parts, xs)
    ys = of_y.build([torch.cat(both) for both in zip(early, late, strict=True)])
    return (structure.build(after), ys), carry


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Compile inside the ``with`` so that backward passes can be repeated, and name the step in errors."""
    from torch._dynamo import config as of_dynamo
    from torch._dynamo import exc
    from torch._functorch import config

    # Hooks of modules inside a cell may change after the first call.
    try:
        with config.patch(donated_buffer=False), of_dynamo.patch(skip_nnmodule_hook_guards=False):
            yield
    except getattr(exc, "FailOnRecompileLimitHit", ()) as error:
        raise ChainError(
            f"{name} is compiled anew too often: torch compiles once for each value of a number that the step takes "
            "from outside. Make such numbers tensors, or leave compile=True out."
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
