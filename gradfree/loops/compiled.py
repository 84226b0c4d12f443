"""Chunks of steps that ``torch.compile`` compiles as one function: the start of operations is what costs most."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gradfree.errors import ChainError
from gradfree.loops.recurrence import LeafStep, Loop, Structure, leaf_step
from gradfree.torchside.graph import walk
from gradfree.torchside.guards import are_near
from gradfree.torchside.hooks import without_hooks
from gradfree.torchside.private import hooks_of, saves_elsewhere
from gradfree.torchside.random_state import RandomState

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


Chunk = Callable[[LeafStep, Sequence[Tensor], Sequence[Tensor]], tuple[Sequence[Tensor], list[Tensor]]]
""":func:`run_chunk`, :func:`run_chunk_of_segments`, or one of them compiled."""


class Compiler:
    """Compiles chunks, a function for each set of shapes and each grad mode."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, Chunk] = {}

    def run(
        self, name: str, chunk: Chunk, step: LeafStep, carry: Sequence[Tensor], xs: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], list[Tensor], Sequence[Tensor]]:
        """Run all steps of ``xs`` in chunks, and those that are left one by one.

        Args:
            name: of the step, for messages.
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
            run = self._compiled(name, chunk, step, carry, part) if len(part[0]) == CHUNK else chunk
            carry, ys = run(step, carry, part)
            pieces.append(ys)
        return (
            carry,
            [of_leaf[0] if len(of_leaf) == 1 else torch.cat(of_leaf) for of_leaf in zip(*pieces, strict=True)],
            before,
        )

    def _compiled(
        self, name: str, chunk: Chunk, step: LeafStep, carry: Sequence[Tensor], xs: Sequence[Tensor]
    ) -> Chunk:
        # A checkpoint's second run must save what the first one did, and only the first use is compared.
        if chunk is run_chunk_of_segments and saves_elsewhere():
            return chunk
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in (*carry, *xs))
        key = (chunk, shapes, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if key not in self._functions:
            compiled = _compile(chunk, carry[0].device, len(self._functions))
            if chunk is run_chunk_of_segments and not _is_right(compiled, chunk, step, carry, xs):
                warnings.warn(
                    f"{name} runs uncompiled in segments: torch.compile gives other results or gradients than the step "
                    "itself. With engine='backprop' it is compiled, without segments.",
                    stacklevel=2,
                )
                compiled = chunk
            self._functions[key] = compiled
        return self._functions[key]


def _compile(chunk: Any, device: torch.device, number: int) -> Chunk:
    _check_compiler(device)
    # Another code object for each, since torch counts recompilations by code.
    code = chunk.__code__.replace(co_name=f"{chunk.__name__}_{number}")
    own = FunctionType(code, chunk.__globals__, code.co_name)
    # On a CPU most of a chunk's time is Python's. On GPUs torch cannot compile backward passes so (issue 178845).
    found: Chunk = torch.compile(own, fullgraph=True, dynamic=False, options={"cpp_wrapper": device.type == "cpu"})
    return found


def _is_right(compiled: Chunk, chunk: Chunk, step: LeafStep, carry: Sequence[Tensor], xs: Sequence[Tensor]) -> bool:
    """Return whether a compiled chunk has the results and gradients of the chunk itself, up to rounding.

    Of chunks in segments torch.compile loses the gradient of a ``torch.autograd.Function`` in silence, for example.
    """
    carry, xs = ([t.detach().requires_grad_(t.requires_grad) for t in part] for part in (carry, xs))
    with RandomState().restored():  # Compilation draws random numbers.
        expected, found = ([*after, *ys] for after, ys in (run(step, carry, xs) for run in (chunk, compiled)))
        if leaves := walk(expected).leaves:
            with without_hooks(leaves):
                expected, found = ([*outputs, *_gradients(outputs, leaves)] for outputs in (expected, found))
    return all(_is_same(a, b) for a, b in zip(found, expected, strict=True))


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradients of ``leaves``, zero where there is none, of a function of all outputs."""
    live = [t for t in outputs if t.requires_grad]
    if not live:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad(live, leaves, [1 + t.detach() for t in live], allow_unused=True, materialize_grads=True)


def _is_same(found: Tensor, expected: Tensor) -> bool:
    if not expected.numel() or not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(found, expected)
    return bool(are_near(found, expected, torch.finfo(expected.dtype).eps ** 0.5))


def _hooks(tensors: Sequence[Tensor]) -> list[int]:
    return [len(hooks_of(t) or ()) for t in tensors]


def run_every_step(loop: Loop, compiler: Compiler | None) -> tuple[Any, Any]:
    """Run ``loop`` step by step or, with a compiler, in compiled chunks; return the final carry and the outputs."""
    found: tuple[Any, Any] = loop.run() if compiler is None else run_compiled(loop, compiler)[0]
    return found


def run_compiled(loop: Loop, compiler: Compiler) -> tuple[tuple[Any, Any], Any]:
    """Run ``loop`` in compiled chunks, but for its first steps.

    Returns:
        The final carry and the outputs; the carry after the first steps.

    Raises:
        ChainError: the step cannot be compiled, or it registers hooks on its carry.
    """
    head = (loop.length - 1) % CHUNK + 1
    carry, first = replace(loop, xs=[x if x is None else x[:head] for x in loop.xs]).run()
    if head == loop.length:
        return (carry, first), carry
    (structure, parts), (of_y, early) = Structure.of(carry), Structure.of(first)
    with compiling(loop.name):
        step, xs = leaf_step(loop, structure, of_y), [x[head:] for x in loop.xs if x is not None]
        hooks = _hooks(parts)
        after, late, _ = compiler.run(loop.name, run_chunk, step, parts, xs)
    if hooks != _hooks(parts):
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
