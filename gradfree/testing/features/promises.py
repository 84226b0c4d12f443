"""What an engine keeps to on every chain that it takes, whatever is done with it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradfree.engines.engine import Engine
from gradfree.testing.cases.cases import ModelCase, Specimen, attached
from gradfree.testing.cases.models import assert_equal_gradients
from gradfree.testing.features.feature import feature


@feature("forward and backward pass", everywhere=True)
def forward_and_backward(engine: Engine, case: ModelCase) -> None:
    """Outputs and buffers are bitwise the model's own; the same parameters get gradients, those behind the chain exact.

    With backpropagation in the engine's place all gradients are exact: what the engine is given is right.
    """
    alone = Specimen(case)
    outputs, exact = _pass(alone)
    with attached(engine, case) as specimen:
        actual_outputs, actual = _pass(specimen)
    _require_outputs(engine, actual_outputs, outputs)
    for name, buffer in alone.model.named_buffers():
        require(
            torch.equal(specimen.model.get_buffer(name), buffer),
            f"the buffer {name} is not that of the model without an engine",
        )
    behind = {name for name in exact if name.startswith("head")}
    kept = {name: g if name in behind else _shape_of(g) for name, g in actual.items()}
    assert_equal_gradients(kept, {name: g if name in behind else _shape_of(g) for name, g in exact.items()})
    specimen = Specimen(case)
    with engine.attach(specimen.model, specimen.chains) as handle, handle.exactly():
        assert_equal_gradients(_pass(specimen)[1], exact)


@feature("loss times 1e-4 and 65536", everywhere=True)
def linear_in_the_loss(engine: Engine, case: ModelCase) -> None:
    """The gradients of s·loss are s times those of the loss: loss scaling and accumulation rely on it."""
    expected = _seeded_gradients(engine, case, 1.0)
    for scale in (1e-4, 65536.0):
        assert_equal_gradients(_seeded_gradients(engine, case, scale), expected, within(engine, 1e-12))


@feature("the same step again", everywhere=True, repeats=True)
def repeated(engine: Engine, case: ModelCase) -> None:
    """A pass repeated gives the same gradients, and without ``zero_grad()`` twice as much."""
    with attached(engine, case) as specimen:
        torch.manual_seed(1)
        once = specimen.gradients()
        torch.manual_seed(1)
        specimen.backward()
    twice = {name: None if g is None else g / 2 for name, g in specimen.collected().items()}
    assert_equal_gradients(twice, once, within(engine, 1e-14))


@feature("eval mode", everywhere=True, repeats=True)
def eval_mode(engine: Engine, case: ModelCase) -> None:
    """In ``eval()`` outputs and buffers are those of the model alone; the gradients of any two passes are the same."""
    alone = Specimen(case)
    alone.model.eval()
    with attached(engine, case) as specimen:
        specimen.model.eval()
        _require_outputs(engine, specimen.model(specimen.x), alone.model(specimen.x))
        assert_equal_gradients(specimen.gradients(), specimen.gradients(), within(engine, 1e-14))


@feature("attach and detach", everywhere=True)
def no_trace(engine: Engine, case: ModelCase) -> None:
    """Attached, classes and ``state_dict`` keys are the model's own; detached, everything is as it was."""
    specimen = Specimen(case)
    before, keys, classes = (
        _attributes(specimen.model),
        [*specimen.model.state_dict()],
        [*map(type, specimen.model.modules())],
    )
    engine.validate(specimen.model, specimen.chains)
    require(_attributes(specimen.model) == before, "validate() changes the model")
    handle = engine.attach(specimen.model, specimen.chains)
    require([*specimen.model.state_dict()] == keys, "attaching changes the keys of state_dict()")
    require([*map(type, specimen.model.modules())] == classes, "attaching changes the classes of modules")
    specimen.gradients()
    handle.detach()
    handle.detach()
    specimen.model.zero_grad()
    specimen.model.load_state_dict(Specimen(case).model.state_dict())
    require(_attributes(specimen.model) == before, "detaching leaves a trace")


@feature("no wait for the device")
def no_host_sync(engine: Engine, case: ModelCase) -> None:
    """A step reads no number back from the device, ``.item()`` and the like: on a GPU that stalls the queue.

    But for an engine that iterates to a tolerance, which looks at its mismatch once a sweep.
    """
    with attached(engine, case) as specimen:
        # The first pass may look, the thousands behind it may not.
        specimen.gradients()
        with nullcontext() if engine.outputs_within(torch.float64) else _NoSync():
            specimen.gradients()


@feature("one engine on two models")
def two_models(engine: Engine, case: ModelCase) -> None:
    """Attached to two models, each gets the gradients that it would get alone."""
    with attached(engine, case) as specimen:
        expected = specimen.gradients()
    with attached(engine, case) as one, attached(engine, case) as other:
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.mul_(1.5)
        other.gradients()
        assert_equal_gradients(one.gradients(), expected, within(engine, 0.0))


def within(engine: Engine, tolerance: float) -> float:
    """Return how far gradients in float64 may lie apart: ``tolerance``, or what the engine asks for if more."""
    return max(tolerance, 10 * engine.outputs_within(torch.float64))


def require(condition: bool, message: str) -> None:
    """Raise ``AssertionError(message)`` unless ``condition``, also under ``python -O``."""
    if not condition:
        raise AssertionError(message)


def _require_outputs(engine: Engine, actual: Tensor, expected: Tensor) -> None:
    if tolerance := engine.outputs_within(expected.dtype):
        error = (actual - expected).abs().max() / expected.abs().max()
        require(bool(error <= 10 * tolerance), f"the outputs are off by {error:.0e}, the engine says {tolerance:.0e}")
    else:
        require(torch.equal(actual, expected), "the outputs are not bitwise those of the model without an engine")


def _pass(specimen: Specimen) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return outputs and gradients of a pass that always draws the same numbers."""
    torch.manual_seed(1)
    outputs: list[Tensor] = []

    def loss() -> Tensor:
        outputs.append(specimen.model(specimen.x))
        return outputs[-1].pow(2).sum()

    found = specimen.gradients(loss)
    return outputs[0], found


def _seeded_gradients(engine: Engine, case: ModelCase, scale: float) -> dict[str, Tensor | None]:
    with attached(engine, case) as specimen:
        torch.manual_seed(1)
        found = specimen.gradients(lambda: scale * specimen.loss())
    return {name: None if g is None else g / scale for name, g in found.items()}


def _shape_of(gradient: Tensor | None) -> Tensor | None:
    """Return zeros in place of finite numbers."""
    return None if gradient is None else gradient * 0.0


def _attributes(model: nn.Module) -> dict[str, dict[str, str]]:
    return {path: {k: repr(v) for k, v in vars(module).items()} for path, module in model.named_modules()}


class _NoSync(TorchDispatchMode):
    _waiting = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
    _comparing = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default, torch.ops.aten.masked_select.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What is kept on the CPU, as random states are, is no state or gradient.
        compares = func in self._comparing and args[0].is_floating_point()
        masked = func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype is torch.bool for i in args[1])
        require(not (func in self._waiting or compares or masked), f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
