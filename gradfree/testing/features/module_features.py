"""What people do to a model with an engine on it: freeze, tie, wrap, copy, save, move and compile it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from gradfree.engines.engine import Engine
from gradfree.testing.cases.cases import LAYERS, RESIDUAL, ModelCase, Specimen, attached
from gradfree.testing.cases.models import assert_equal_gradients
from gradfree.testing.features.feature import feature
from gradfree.testing.features.pass_features import reference, total_of
from gradfree.testing.features.promises import require


@feature("frozen parameters", repeats=True)
def frozen(engine: Engine, case: ModelCase) -> None:
    """They get no gradient and the others the same as ever, also when it changes while the engine is attached."""
    expected = reference(engine, case)
    with attached(engine, case) as specimen:
        names = dict(specimen.model.named_parameters())
        inside = [name for name in names if name.startswith(specimen.chains[0])]
        for chosen in (["stem.weight", "stem.bias"], inside[2:4], inside, [n for n in names if "bias" in n], []):
            for name, parameter in names.items():
                parameter.requires_grad_(name not in chosen)
            kept = {name: None if name in chosen else g for name, g in expected.items()}
            assert_equal_gradients(specimen.gradients(), kept)


@feature("unused parameters")
def unused(engine: Engine, case: ModelCase) -> None:
    """A parameter that no loss depends on gets no gradient, and the others the same as ever."""
    specimen = Specimen(case)
    owners = {
        "": specimen.model,
        **{f"{specimen.chains[0]}.{name}.": block for name, block in specimen.chain.named_children()},
    }
    for owner in owners.values():
        owner.register_parameter("unused", nn.Parameter(torch.zeros(3, device=case.device)))
    with specimen.attached(engine):
        actual = specimen.gradients()
    none = dict.fromkeys(f"{path}unused" for path in owners)
    assert_equal_gradients(actual, reference(engine, case) | none)


@feature("tied parameters", repeats=True)
def tied(engine: Engine, case: ModelCase) -> None:
    """A parameter in two places gets the sum of what two equal ones get."""
    separate, together = Specimen(case), Specimen(case)
    inside = [(name, p.shape) for name, p in separate.model.named_parameters() if name.startswith(case.chain)]
    first, second = next((a, b) for (a, one), (b, other) in combinations(inside, 2) if one == other)
    with torch.no_grad():
        separate.model.get_parameter(second).copy_(separate.model.get_parameter(first))
    path, _, attribute = second.rpartition(".")
    setattr(together.model.get_submodule(path), attribute, together.model.get_parameter(first))
    with separate.attached(engine), together.attached(engine):
        expected, actual = separate.gradients(), together.gradients()
    twice = expected.pop(second)
    expected[first] = total_of({first: expected[first]}, {first: twice})[first]
    assert_equal_gradients(actual, expected)


@feature("weight_norm", families=(RESIDUAL, LAYERS))
def parametrized(engine: Engine, case: ModelCase) -> None:
    """Parameters that weights are computed from get the weights' gradients, pulled back."""
    plain, specimen = Specimen(case), Specimen(case)
    linear = [path for path, module in specimen.chain.named_modules() if isinstance(module, nn.Linear)]
    for path in linear:
        weight_norm(specimen.chain.get_submodule(path))
    with plain.attached(engine), specimen.attached(engine):
        expected, actual = plain.gradients(), specimen.gradients()
    for path in linear:
        layer, name = specimen.chain.get_submodule(path), f"{specimen.chains[0]}.{path}"
        sources = dict(layer.named_parameters(prefix=name))
        del sources[f"{name}.bias"]
        pulled = torch.autograd.grad(layer.weight, list(sources.values()), expected.pop(f"{name}.weight"))
        expected |= dict(zip(sources, pulled, strict=True))
    assert_equal_gradients(actual, expected)


@feature("checkpointing inside blocks", families=(RESIDUAL,))
def checkpoint_inside(engine: Engine, case: ModelCase) -> None:
    """``torch.utils.checkpoint`` around what a block calls changes no gradient."""
    with attached(engine, case) as specimen:
        for block in specimen.chain.children():
            for part in block.children():
                part.forward = _checkpointed(part.forward)
        actual = specimen.gradients()
    assert_equal_gradients(actual, reference(engine, case))


@feature("checkpointing around each block", families=(RESIDUAL, LAYERS))
def checkpoint_around_blocks(engine: Engine, case: ModelCase) -> None:
    """``torch.utils.checkpoint`` around the call of each block changes no gradient."""
    with attached(engine, case) as specimen:
        h = specimen.model.stem(specimen.x)
        for block in specimen.chain.children():
            h = checkpoint(block, h, use_reentrant=False)
        actual = specimen.gradients((h * specimen.model.heads[-1]).flatten(1).sum(1).pow(2).sum())
    assert_equal_gradients(actual, reference(engine, case))


@feature("checkpointing around the model")
def checkpoint_around(engine: Engine, case: ModelCase) -> None:
    """``torch.utils.checkpoint`` around the model changes no gradient."""
    with attached(engine, case) as specimen:
        out = checkpoint(specimen.model, specimen.x.requires_grad_(), use_reentrant=False)
        actual = specimen.gradients(out.pow(2).sum())
    assert_equal_gradients(actual, reference(engine, case))


@feature("torch.func.functional_call", repeats=True)
def functional_call(engine: Engine, case: ModelCase) -> None:
    """Parameters from outside, in place of the model's own, get the gradients that they would get inside."""
    with attached(engine, case) as specimen:
        given = {name: (1.5 * p.detach()).requires_grad_() for name, p in specimen.model.named_parameters()}
        torch.func.functional_call(specimen.model, given, (specimen.x,)).pow(2).sum().backward()
        specimen.model.load_state_dict(given)
        assert_equal_gradients({name: p.grad for name, p in given.items()}, specimen.gradients())


@feature("copy.deepcopy while attached", repeats=True)
def deepcopy(engine: Engine, case: ModelCase) -> None:
    """The copy has the engine, and separate weights. It counts no optimizer steps."""
    with attached(engine, case) as specimen:
        expected = specimen.gradients()
        other = Specimen(case)
        other.model = copy.deepcopy(specimen.model)
        with torch.no_grad():
            for parameter in specimen.model.parameters():
                parameter.zero_()
        assert_equal_gradients(other.gradients(), expected)


@feature("model.to() while attached", repeats=True)
def moved(engine: Engine, case: ModelCase) -> None:
    """The gradients are those of a model that was converted first."""
    with attached(engine, case) as specimen:
        specimen.gradients()
        specimen.model.float()
        specimen.x = specimen.x.float()
        actual = specimen.gradients()
    assert_equal_gradients(actual, reference(engine, case, torch.float32), tolerance=1e-6)


@feature("torch.compile of each block", families=(RESIDUAL,), slow=True)
def compiled_blocks(engine: Engine, case: ModelCase) -> None:
    """Blocks that are compiled once the engine is attached get the same gradients."""
    _check_compiled(engine, case, lambda specimen: list(specimen.chain.children()))


@feature("torch.compile of the model", slow=True)
def compiled_model(engine: Engine, case: ModelCase) -> None:
    """A model that is compiled once the engine is attached gets the same gradients."""
    _check_compiled(engine, case, lambda specimen: [specimen.model])


@feature("attaching to a compiled model", slow=True)
def compiled_before(engine: Engine, case: ModelCase) -> None:
    """A model that was compiled before gets the same gradients."""
    specimen = Specimen(case)
    specimen.model.compile(backend="aot_eager")
    with specimen.attached(engine):
        assert_equal_gradients(specimen.gradients(), reference(engine, case))


def _check_compiled(engine: Engine, case: ModelCase, chosen: Callable[[Specimen], list[nn.Module]]) -> None:
    from torch._dynamo.utils import counters  # It takes a second.

    expected = reference(engine, case)
    # What was compiled before, for other models, would count against the limit of recompilations.
    torch._dynamo.reset()
    counters.clear()
    with attached(engine, case) as specimen:
        for module in chosen(specimen):
            module.compile(backend="aot_eager")
        actual = specimen.gradients()
    require(counters["aot_autograd"]["ok"] > 0, "nothing was compiled")
    assert_equal_gradients(actual, expected)


def _checkpointed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)
