"""All private functions of torch that gradfree uses, what for, and what happens without them.

Each name is resolved and called once, when gradfree is imported. If torch lacks it, or does not take that call, a
slower or less precise fallback is used, or its call raises a :class:`~gradfree.ChainError` that names it. A wrong
gradient never results. ``tests/torchside/test_private.py`` removes and changes each of :data:`NAMES` and trains.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from ctypes import py_object, pythonapi
from functools import partial, wraps
from math import inf
from operator import attrgetter
from pkgutil import resolve_name
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.nn.modules import module
from torch.utils.checkpoint import __file__ as checkpoint_file

from gradfree.errors import ChainError

_P = ParamSpec("_P")
_T = TypeVar("_T")

NAMES: dict[str, str] = {}
"""The private names of torch that are used, each with what is lost without it."""

_NODE: Any = torch.ones(1, requires_grad=True).view(1).grad_fn

LEAF: Any = type(_NODE.next_functions[0][0])
"""The class of the graph nodes of leaf tensors (AccumulateGrad); torch has no public name for it."""


def _private(name: str, lost: str, call: Callable[[Any], object] | None = None) -> Any:
    """Return a private object of torch by name; ``None`` if this version lacks it.

    Args:
        name: where it is.
        lost: what is lost without it.
        call: calls it as gradfree does, without effect. If it takes no such call, it counts as absent.
    """
    NAMES[name] = lost
    with suppress(AttributeError, ImportError):
        found = resolve_name(name)
        return found if call is None or _takes(found, call) else None
    return None


def _takes(function: Any, call: Callable[[Any], object]) -> bool:
    try:
        call(function)
    except (TypeError, ValueError):
        return False
    except RuntimeError:
        pass  # Outside a backward pass some of them refuse.
    return True


def _needed(name: str, purpose: str, call: Callable[[Any], object] | None = None, attribute: bool = False) -> Any:
    """Return a private function of torch or a getter of a private attribute; without it, a function that raises."""
    found = _private(name, f"backward passes raise: nothing else {purpose}", call)
    if found is None:
        return partial(_missing, name, purpose)
    return attrgetter(name.rpartition(".")[2]) if attribute else found


def _missing(name: str, purpose: str, *_: Any) -> Any:
    raise ChainError(
        f"torch {torch.__version__} has no {name}, or a changed one, by which an engine {purpose}. Use a version of "
        "torch that gradfree is tested with, or train without an engine."
    )


def _never(*_: Any) -> bool:
    return False


# The backward pass that is running.

backward_id: Callable[[], int] = _needed(
    "torch._C._current_graph_task_id", "distinguishes two backward passes through one graph", lambda f: f()
)
"""Return the number of the backward pass that runs in this thread; -1 if there is none."""

will_run: Callable[[Node], bool] = _needed(
    "torch._C._will_engine_execute_node",
    "knows whether a backward pass reaches the node that solves the chain",
    lambda f: f(_NODE),
)
"""Return whether the running backward pass executes ``node``; for a leaf in ``autograd.grad``, a ``RuntimeError``."""

_keeps_graph = _private(
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "tensors of a pass are freed with its graph, not before",
    lambda f: f(),
)

_BACKWARD = "torch.autograd.graph._engine_run_backward", "finds the inputs of a call of torch.autograd.grad"
_call_of_backward = _needed(*_BACKWARD, lambda f: f.__code__.co_varnames.index("args"), attribute=True)

after_backward: Callable[[Callable[[], None]], None] = _needed(
    "torch.autograd.Variable._execution_engine.queue_callback",
    "restores hooks when a backward pass has ended",
    lambda f: f(lambda: None),
)
"""Call a function when the running backward pass ends."""


def keeps_graph() -> bool:
    """Return whether the running backward pass was called with ``retain_graph=True``; ``True`` if unknown."""
    return True if _keeps_graph is None else bool(_keeps_graph())


def asked_for() -> Iterator[tuple[Any, int]]:
    """Yield node and output number of each input of the running ``torch.autograd.grad``, except for leaf tensors.

    Autograd's nodes do not have this information; the frame of the call has. Nodes of other devices run
    in autograd's own threads; there the calls of all threads are considered.
    """
    code = _call_of_backward(torch.autograd.graph).__code__
    own = _frame_of(code, sys._getframe())
    for call in [own] if own else [_frame_of(code, frame) for frame in sys._current_frames().values()]:
        for asked in _inputs(call.f_locals["args"]) if call else ():
            if isinstance(asked, GradientEdge):
                yield asked.node, asked.output_nr
            elif asked.grad_fn is not None:
                yield asked.grad_fn, asked.output_nr


def _inputs(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs among the arguments of torch's call: after cotangents, retain_graph and create_graph."""
    if len(arguments) < 4 or not isinstance(arguments[3], tuple):
        _missing(*_BACKWARD)
    return arguments[3]


def _frame_of(code: Any, frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


# The graph, and hooks and versions of tensors.


def node_class(function: type[torch.autograd.Function]) -> Any:
    """Return the class of the nodes of an autograd function that has just been defined; it is found by its name."""
    return [kind for kind in BackwardCFunction.__subclasses__() if kind.__name__ == f"{function.__name__}Backward"][-1]


def function_of(kind: type) -> type:
    """Return the autograd function whose nodes are of class ``kind``; ``kind`` if torch stores it elsewhere."""
    return getattr(kind, "_forward_cls", kind)


Function: Any = (
    _private("torch.autograd.function._SingleLevelFunction", "each block of a pass takes 10 µs longer")
    or torch.autograd.Function
)
"""Base class of our nodes: ``torch.autograd.Function`` checks each argument, and Start has one for each parameter."""

changes: Callable[[Tensor], int] = _needed(
    "torch.Tensor._version", "notices that a state was changed in place", attribute=True
)
"""Return how often a tensor was changed in place; raises for tensors of inference mode, which do not count."""


def version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for tensors of inference mode."""
    return 0 if tensor.is_inference() else changes(tensor)


_sequence_number: Callable[[Node], Callable[[], int]] = _needed(
    "torch.autograd.graph.Node._sequence_nr",
    "distinguishes what a step makes from what it takes from outside",
    attribute=True,
)


def sequence_number(node: Node) -> int:
    """Return the number of a node: those made later in a thread have larger ones."""
    return _sequence_number(node)()


def next_sequence_number() -> float:
    """Return the number from which on nodes are made now, in this thread; infinite where gradients are disabled."""
    node = torch.empty(0, requires_grad=True).view(0).grad_fn
    return inf if node is None else sequence_number(node)


hooks_of: Callable[[Tensor], OrderedDict[int, Any] | None] = _needed(
    "torch.Tensor._backward_hooks", "notices gradient hooks on states", attribute=True
)
"""Return the gradient hooks that are on a tensor."""

late_hooks_of: Callable[[Tensor], OrderedDict[int, Any] | None] = _needed(
    "torch.Tensor._post_accumulate_grad_hooks", "spares hooks of parameters that get no gradient", attribute=True
)
"""Return the hooks that follow the accumulation of a tensor's gradient."""


_add_hooks = _private(
    "torch.autograd.function.BackwardCFunction._register_hook_dict",
    "late gradient hooks on states that the model drops see a part of the gradient",
)


def when_hooked(kind: Any, call: Callable[[Any, Tensor], None]) -> None:
    """Before the first gradient hook is put on an output of a node of class ``kind``, call ``call`` with both."""

    def add(node: Any, tensor: Tensor) -> None:
        call(node, tensor)
        _add_hooks(node, tensor)

    if _add_hooks is not None:
        kind._register_hook_dict = add


def global_hooks() -> list[Any]:
    """Return the global module hooks of any kind.

    If torch stores them under another name, they are not found; then tensors in these hooks have no or partial
    gradients.
    """
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return [hook for kind in kinds for hook in getattr(module, f"_global_{kind}_hooks", {}).values()]


_assert_async = _private(
    "torch._assert_async",
    "the host waits while what runs again is compared with the pass",
    lambda f: f(torch.ones((), dtype=torch.bool), ""),
)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Raise on the device if ``condition`` is false, without waiting; wait if torch or the device lacks this."""
    with suppress(NotImplementedError):
        if _assert_async is not None:
            _assert_async(condition, message)
            return
    if not condition:
        raise RuntimeError(message)


# The context of a call: checkpoints, transforms, tracing, compilation.

_saved_hooks = _private(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "checkpoints are recognised by their frames, which takes longer; other hooks for saved tensors see states of a row",
    lambda f: f(False),
)


def recomputed() -> bool:
    """Return whether a checkpoint, ``use_reentrant=False``, is running its function again in a backward pass."""
    return _checkpoint("_recomputation_hook", "unpack_hook")


def checkpointed() -> bool:
    """Return whether a checkpoint, ``use_reentrant=False``, is running its function for the first time."""
    return _checkpoint("_checkpoint_hook", "checkpoint")


def _checkpoint(hook: str, function: str) -> bool:
    """Return whether the innermost hooks for saved tensors, or the innermost frame of a checkpoint, have this name."""
    if _saved_hooks is not None:
        top = _saved_hooks(False)
        return top is not None and hook in getattr(top[0], "__qualname__", "")
    frame: FrameType | None = sys._getframe()
    # A reentrant checkpoint has no hooks, and runs its function in the method of an autograd function.
    while frame and (frame.f_code.co_filename, frame.f_code.co_name) not in _CHECKPOINT_FRAMES:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == function


_CHECKPOINT_FRAMES = [(checkpoint_file, name) for name in ("unpack_hook", "checkpoint", "forward", "backward")]


def saves_elsewhere() -> bool:
    """Return whether hooks for saved tensors are on, such as those of a checkpoint around the model."""
    if _saved_hooks is None:
        return recomputed() or checkpointed()
    return _saved_hooks(True) is not None


transforms_active: Callable[[], bool] = (
    _private(
        "torch._C._are_functorch_transforms_active", "transforms of torch.func end in torch's own errors", lambda f: f()
    )
    or _never
)
"""Return whether a transform of ``torch.func`` is running."""


def other_pass() -> str | None:
    """Return the name, for messages, of a tracing or differentiation mode that runs the model; ``None`` if none does.

    Two of the modes are read from private flags. ``compiled_autograd`` is not imported for that, since its import is
    slow. If a flag is missing, torch raises its own error for such a pass.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return "torch.jit.trace"
    if getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0:
        return "forward-mode differentiation (torch.autograd.forward_ad)"
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return "compiled autograd" if getattr(compiled, "compiled_autograd_enabled", False) else None


_dispatch_modes = _private(
    "torch._C._len_torch_dispatch_stack", "traced evaluation ends in torch's own errors", lambda f: f()
)


def is_traced() -> bool:
    """Return whether operations are recorded or simulated, as in ``torch.export``, ``make_fx`` and FakeTensorMode."""
    return torch.compiler.is_compiling() or (_dispatch_modes is not None and _dispatch_modes() > 0)


def is_simulated(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has no values, as in FakeTensorMode and on the device "meta"."""
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


is_one_of_many: Callable[[Tensor], bool] = (
    _private(
        "torch._C._functorch.is_legacy_batchedtensor",
        "is_grads_batched=True ends in torch's own errors",
        lambda f: f(torch.empty(0)),
    )
    or _never
)
"""Return whether a cotangent is a batch of cotangents, ``is_grads_batched=True``."""

_frame_callback = _private(
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "each call costs 20 µs more, and no blocks run as a row",
    lambda f: f(),
)
_disable = _private("torch._compile._disable_dynamo", "attaching imports torch's compiler", lambda f: f(_never))


def _is_borrowed() -> bool:
    before = sys.getrefcount(None)
    for _ in range(100):
        _frame_callback()
    return sys.getrefcount(None) < before - 50


_BORROWED = _frame_callback is not None and _is_borrowed()
"""Whether torch returns the callback without a reference of the caller's, as torch 2.6 does."""


def is_compiled(module: nn.Module) -> bool:
    """Return whether the module is compiled."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def is_compiled_around() -> bool:
    """Return whether compiled code may be running: ``True`` also if it cannot be known."""
    if torch.compiler.is_dynamo_compiling() or _frame_callback is None:
        return True
    callback = _frame_callback()
    if _BORROWED:
        pythonapi.Py_IncRef(py_object(callback))
    return callback is not None


def allow_repeated_backward() -> None:
    """Let backward passes that torch compiles from now on run again: by default they overwrite what they have saved."""
    from torch._functorch import config

    config.donated_buffer = False


def as_written() -> AbstractContextManager[Any]:
    """Run what the user has compiled as it is written: torch compiles neither in modes for functions nor in vmap."""
    # Without it nothing is compiled, and its import takes a second.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Do what ``torch.compiler.disable`` does, without importing the compiler and faster outside of compiled code."""
    disabled = (_disable or torch.compiler.disable)(function)

    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return disabled(*args, **kwargs) if is_compiled_around() else function(*args, **kwargs)

    # Torch counts recompilations by code, so each wrapper has its own.
    called.__code__ = called.__code__.replace(co_name=f"uncompiled_{function.__name__}")
    return wraps(function)(called)
