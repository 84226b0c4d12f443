"""What people do with passes in plain PyTorch; the same engine without it is the reference."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from gradfree.engines.engine import Engine
from gradfree.testing.cases.cases import LAYERS, RESIDUAL, ModelCase, Specimen, attached
from gradfree.testing.cases.models import Gradients, assert_equal_gradients
from gradfree.testing.features.feature import feature
from gradfree.testing.features.promises import require


def reference(engine: Engine, case: ModelCase, dtype: torch.dtype = torch.float64) -> dict[str, Tensor | None]:
    """Return the engine's gradients of the case as it is."""
    with attached(engine, case, dtype) as specimen:
        return specimen.gradients()


@feature("float32 weights", repeats=True)
def float32(engine: Engine, case: ModelCase) -> None:
    """The gradients are those of float64 to six digits."""
    assert_equal_gradients(_double(reference(engine, case, torch.float32)), reference(engine, case), tolerance=1e-5)


@feature("bfloat16 weights", repeats=True)
def bfloat16(engine: Engine, case: ModelCase) -> None:
    """The gradients are those of float64, of the same rounded weights, to two digits."""
    with attached(engine, case, torch.bfloat16) as specimen:
        low = specimen.gradients()
        specimen.model.double()
        specimen.x = specimen.x.double()
        assert_equal_gradients(_double(low), specimen.gradients(), tolerance=0.05)


@feature("bfloat16 autocast", repeats=True)
def autocast(engine: Engine, case: ModelCase) -> None:
    """The gradients are float32 and those without autocast to two digits."""
    with attached(engine, case, torch.float32) as specimen:
        with torch.autocast(specimen.x.device.type, torch.bfloat16):
            loss = specimen.loss()
        low = specimen.gradients(loss)
        assert_equal_gradients(low, specimen.gradients(), tolerance=0.05)


@feature("float16 autocast with GradScaler", repeats=True)
def grad_scaler(engine: Engine, case: ModelCase) -> None:
    """Steps that overflow are skipped until the scale fits; then the gradients are those without to two digits."""
    with attached(engine, case, torch.float32) as specimen:
        expected = specimen.gradients()
        weights = copy.deepcopy(specimen.model.state_dict())
        optimizer = torch.optim.SGD(specimen.model.parameters(), 0.1)
        device = specimen.x.device.type
        scaler = torch.amp.GradScaler(device, init_scale=2.0**40)
        for _ in range(50):
            with torch.autocast(device, torch.float16):
                loss = specimen.loss()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            actual, scale = specimen.collected(), scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() == scale:
                break
            unchanged = all(torch.equal(value, weights[name]) for name, value in specimen.model.state_dict().items())
            require(unchanged, "a step that overflowed was not skipped")
        require(scale < 2.0**40, "the scale of 2⁴⁰ did not overflow")
    assert_equal_gradients(actual, expected, tolerance=0.05)


@feature("gradient accumulation", repeats=True)
def accumulation(engine: Engine, case: ModelCase) -> None:
    """The gradients of four micro-batches add up to the batch's."""
    with attached(engine, case) as specimen:
        for part in specimen.x.chunk(4):
            specimen.loss(part).backward()
    assert_equal_gradients(specimen.collected(), reference(engine, case))


@feature("batches of another size", repeats=True)
def other_batch(engine: Engine, case: ModelCase) -> None:
    """A smaller last batch gets the gradients that it gets first."""
    with attached(engine, case) as specimen:
        expected = specimen.gradients(specimen.loss(specimen.x[:3]))
    with attached(engine, case) as specimen:
        specimen.gradients()
        assert_equal_gradients(specimen.gradients(specimen.loss(specimen.x[:3])), expected)


@feature("several passes, one backward", repeats=True)
def several_passes(engine: Engine, case: ModelCase) -> None:
    """The gradients of a sum of two passes' losses are the sums of theirs."""
    with attached(engine, case) as specimen:
        parts = specimen.x.chunk(2)
        total = specimen.gradients(specimen.loss(parts[0]) + specimen.loss(parts[1]))
        assert_equal_gradients(total, total_of(*(specimen.gradients(specimen.loss(part)) for part in parts)))


@feature("retain_graph=True", repeats=True)
def retain_graph(engine: Engine, case: ModelCase) -> None:
    """Two losses of one pass, one after the other, give the gradients that two passes give."""
    with attached(engine, case) as specimen:
        expected = total_of(specimen.gradients(specimen.model(specimen.x).sum()), specimen.gradients())
        specimen.model.zero_grad()
        out = specimen.model(specimen.x)
        out.sum().backward(retain_graph=True)
        out.pow(2).sum().backward()
    assert_equal_gradients(specimen.collected(), expected)


@feature("gradient of the input", repeats=True)
def gradient_of_the_input(engine: Engine, case: ModelCase) -> None:
    """It is the gradient of a parameter that is added to the input."""
    with attached(engine, case) as specimen:
        shift = torch.zeros_like(specimen.x, requires_grad=True)
        specimen.gradients(specimen.loss(specimen.x + shift))
        specimen.x.requires_grad_()
        assert_equal_gradients(
            specimen.gradients() | {"x": specimen.x.grad}, reference(engine, case) | {"x": shift.grad}
        )


@feature("create_graph=True")
def create_graph(engine: Engine, case: ModelCase) -> None:
    """A penalty on the gradients has the derivative that it has without an engine."""

    def slope(specimen: Specimen) -> Tensor:
        parameters = list(specimen.model.parameters())
        found = torch.autograd.grad(specimen.loss(), parameters, create_graph=True, allow_unused=True)
        penalty = torch.stack([g.pow(2).sum() for g in found if g is not None]).sum()
        return torch.autograd.grad(penalty, specimen.model.get_parameter("stem.weight"))[0]

    with attached(engine, case) as specimen:
        actual = slope(specimen)
    torch.testing.assert_close(actual, slope(Specimen(case)))


@feature("hooks on parameters")
def parameter_hooks(engine: Engine, case: ModelCase) -> None:
    """They run once a pass, with the whole gradient."""
    expected = reference(engine, case)
    with attached(engine, case) as specimen:
        calls: list[str] = []
        for name, parameter in specimen.model.named_parameters():
            parameter.register_hook(lambda grad: 3.0 * grad)
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
        actual = specimen.gradients()
    require(len(calls) == len(set(calls)), "a hook ran more than once")
    require(set(calls) == {name for name, g in expected.items() if g is not None}, "a hook did not run")
    assert_equal_gradients(actual, {name: None if g is None else 3.0 * g for name, g in expected.items()})


@feature("no_grad and inference_mode")
def evaluation(engine: Engine, case: ModelCase) -> None:
    """An evaluation between two steps gives the model's own outputs and does not change the next gradients."""
    outputs = Specimen(case).model(Specimen(case).x)
    with attached(engine, case) as specimen:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                out = specimen.model(specimen.x)
            require(torch.equal(out, outputs) and not out.requires_grad, f"{mode.__name__} does not evaluate")
        assert_equal_gradients(specimen.gradients(), reference(engine, case))


@feature("a loss on a state inside the chain", families=(RESIDUAL, LAYERS))
def auxiliary_loss(engine: Engine, case: ModelCase) -> None:
    """Its gradients add to those of the loss at the end."""

    def gradients(*weights: float) -> dict[str, Tensor | None]:
        with attached(engine, case) as specimen:
            states: list[Tensor] = []
            next(specimen.chain.children()).register_forward_hook(lambda *args: states.append(args[-1]))
            losses = specimen.loss(), states[0].pow(2).sum()
            return specimen.gradients(sum((w * loss for w, loss in zip(weights, losses, strict=True)), torch.zeros(())))

    assert_equal_gradients(gradients(1.0, 1.0), total_of(gradients(1.0, 0.0), gradients(0.0, 1.0)))


def total_of(*parts: Gradients) -> dict[str, Tensor | None]:
    """Return the sums of gradients, where ``None`` is zero, unless all are."""
    total: dict[str, Tensor | None] = dict(parts[0])
    for part in parts[1:]:
        for name, g in part.items():
            before = total[name]
            total[name] = before if g is None else g if before is None else before + g
    return total


def _double(gradients: Gradients) -> dict[str, Tensor | None]:
    return {name: None if g is None else g.double() for name, g in gradients.items()}
