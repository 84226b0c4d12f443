"""What an engine keeps to on every chain that it takes, whatever is done with it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradfree.engines.engine import Engine
from gradfree.errors import ChainError
from gradfree.testing.cases.cases import Case, Task, attached
from gradfree.testing.cases.models import assert_equal_gradients
from gradfree.testing.features.registry import feature


@feature("forward and backward pass", everywhere=True)
def forward_and_backward(engine: Engine, case: Case) -> None:
    """Outputs and buffers are bitwise the model's own; the same parameters get gradients, those behind the chain exact.

    With backpropagation in the engine's place all gradients are exact: what the engine is given is right.
    """
    alone = Task(case)
    outputs, exact = _pass(alone)
    with attached(engine, case) as task:
        actual_outputs, actual = _pass(task)
    require(torch.equal(actual_outputs, outputs), "the outputs are not bitwise those of the model alone")
    for name, buffer in alone.model.named_buffers():
        require(torch.equal(task.model.get_buffer(name), buffer), f"the buffer {name} is not that of the model alone")
    behind = {name for name in exact if name.startswith("head")}
    kept = {name: g if name in behind else _shape_of(g) for name, g in actual.items()}
    assert_equal_gradients(kept, {name: g if name in behind else _shape_of(g) for name, g in exact.items()})
    task = Task(case)
    with engine.attach(task.model, task.chains) as handle, handle.exactly():
        assert_equal_gradients(_pass(task)[1], exact)


@feature("loss times 1e-4 and 65536", everywhere=True)
def linear_in_the_loss(engine: Engine, case: Case) -> None:
    """The gradients of s·loss are s times those of the loss: loss scaling and accumulation rely on it."""
    expected = _seeded_gradients(engine, case, 1.0)
    for scale in (1e-4, 65536.0):
        assert_equal_gradients(_seeded_gradients(engine, case, scale), expected, tolerance=1e-12)


@feature("the same step again", everywhere=True)
def repeated(engine: Engine, case: Case) -> None:
    """A pass repeated gives the same gradients, and without ``zero_grad()`` twice as much."""
    with attached(engine, case) as task:
        torch.manual_seed(1)
        once = task.gradients()
        torch.manual_seed(1)
        task.loss().backward()
    twice = {name: None if g is None else g / 2 for name, g in task.collected().items()}
    assert_equal_gradients(twice, once, tolerance=1e-14)


@feature("eval mode", everywhere=True)
def eval_mode(engine: Engine, case: Case) -> None:
    """In ``eval()`` outputs and buffers are those of the model alone; the gradients of any two passes are the same."""
    alone = Task(case)
    alone.model.eval()
    with attached(engine, case) as task:
        task.model.eval()
        require(torch.equal(task.model(task.x), alone.model(task.x)), "the outputs are not those of the model alone")
        assert_equal_gradients(task.gradients(), task.gradients(), tolerance=1e-14)


@feature("attach and detach", everywhere=True)
def no_trace(engine: Engine, case: Case) -> None:
    """Attached, classes and ``state_dict`` keys are the model's own; detached, everything is as it was."""
    task = Task(case)
    before, keys, classes = _attributes(task.model), [*task.model.state_dict()], [*map(type, task.model.modules())]
    engine.validate(task.model, task.chains)
    require(_attributes(task.model) == before, "validate() changes the model")
    handle = engine.attach(task.model, task.chains)
    require([*task.model.state_dict()] == keys, "attaching changes the keys of state_dict()")
    require([*map(type, task.model.modules())] == classes, "attaching changes the classes of modules")
    task.gradients()
    handle.detach()
    handle.detach()
    task.model.zero_grad()
    task.model.load_state_dict(Task(case).model.state_dict())
    require(_attributes(task.model) == before, "detaching leaves a trace")


@feature("no wait for the device")
def no_host_sync(engine: Engine, case: Case) -> None:
    """A step reads no number back from the device, ``.item()`` and the like: on a GPU that stalls the queue."""
    with attached(engine, case) as task:
        # The first pass may look, the thousands behind it may not.
        task.gradients()
        with _NoSync():
            task.gradients()


@feature("one engine on two models")
def two_models(engine: Engine, case: Case) -> None:
    """Attached to two models, each gets the gradients that it would get alone."""
    with attached(engine, case) as task:
        expected = task.gradients()
    with attached(engine, case) as one, attached(engine, case) as other:
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.mul_(1.5)
        other.gradients()
        assert_equal_gradients(one.gradients(), expected, tolerance=0.0)


@feature("attaching twice")
def attached_twice(engine: Engine, case: Case) -> None:
    """A second engine on the same chain is refused, and the first works on."""
    with attached(engine, case) as task:
        expected = task.gradients()
        try:
            engine.attach(task.model, task.chains)
        except ChainError:
            assert_equal_gradients(task.gradients(), expected, tolerance=0.0)
            raise


@feature("a chain that does not exist")
def wrong_path(engine: Engine, case: Case) -> None:
    """The path is refused, and the model stays as it is."""
    task = Task(case)
    before = _attributes(task.model)
    try:
        engine.attach(task.model, ["bloks"])
    except ChainError as error:
        require("bloks" in str(error), f"the message does not name the path: {error}")
        require(_attributes(task.model) == before, "a refused attach() changes the model")
        raise
    raise AssertionError("an engine was attached to a module that does not exist")


def check_is_a_value(engine: Engine) -> None:
    """Check that equal options make equal engines, which pickle, print their options and cannot be changed.

    Raises:
        AssertionError: one of these does not hold.
    """
    same: Any = pickle.loads(pickle.dumps(engine))
    require(same == engine == copy.deepcopy(engine), "a copy is not equal to the engine")
    require(hash(same) == hash(engine), "equal engines have different hashes")
    require(repr(engine).startswith(type(engine).__name__ + "("), f"repr() does not name the class: {engine!r}")
    try:
        engine.no_such_option = 1  # type: ignore[attr-defined]
    except AttributeError:
        pass
    else:
        raise AssertionError("the engine can be changed: make it a frozen dataclass")


def check_names_its_options(engine: Engine) -> None:
    """Check that an unknown option is refused, and the known ones named.

    Raises:
        AssertionError: it is not.
    """
    try:
        type(engine)(no_such_option=1)
    except TypeError as error:
        message = str(error)
    else:
        raise AssertionError("an unknown option is not refused")
    for option in ("no_such_option", *(f.name for f in fields(engine))):
        require(option in message, f"the message does not name {option!r}: {message}")


def require(condition: bool, message: str) -> None:
    """Raise ``AssertionError(message)`` unless ``condition``, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)


def _pass(task: Task) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return outputs and gradients of a pass that always draws the same numbers."""
    torch.manual_seed(1)
    out = task.model(task.x)
    return out, task.gradients(out.pow(2).sum())


def _seeded_gradients(engine: Engine, case: Case, scale: float) -> dict[str, Tensor | None]:
    with attached(engine, case) as task:
        torch.manual_seed(1)
        found = task.gradients(scale * task.loss())
    return {name: None if g is None else g / scale for name, g in found.items()}


def _shape_of(gradient: Tensor | None) -> Tensor | None:
    """Return zeros in place of finite numbers."""
    return None if gradient is None else gradient * 0.0


def _attributes(model: nn.Module) -> dict[str, dict[str, str]]:
    return {path: {k: repr(v) for k, v in vars(module).items()} for path, module in model.named_modules()}


class _NoSync(TorchDispatchMode):
    _waiting = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        require(func not in self._waiting, f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
