"""What people do to a model with an engine on it: freeze, tie, wrap, copy, save, move and compile it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from gradfree.engines.engine import Engine
from gradfree.optimizer import EngineOptimizer
from gradfree.testing.cases.cases import LAYERS, RESIDUAL, Case, Task, attached
from gradfree.testing.cases.models import assert_equal_gradients
from gradfree.testing.features.passes import reference, total_of
from gradfree.testing.features.promises import require
from gradfree.testing.features.registry import feature


@feature("frozen parameters")
def frozen(engine: Engine, case: Case) -> None:
    """They get no gradient and the others the same as ever, also when it changes while the engine is attached."""
    expected = reference(engine, case)
    with attached(engine, case) as task:
        names = dict(task.model.named_parameters())
        inside = [name for name in names if name.startswith(task.chains[0])]
        for chosen in (["stem.weight", "stem.bias"], inside[2:4], inside, [n for n in names if "bias" in n], []):
            for name, parameter in names.items():
                parameter.requires_grad_(name not in chosen)
            kept = {name: None if name in chosen else g for name, g in expected.items()}
            assert_equal_gradients(task.gradients(), kept)


@feature("a frozen beginning", families=(RESIDUAL, LAYERS))
def frozen_beginning(engine: Engine, case: Case) -> None:
    """The rest trains as a chain of its own behind a fixed network."""
    with attached(engine, case) as task:
        first = list(task.chain.children())[:2]
        for part in (task.model.stem, *first):
            part.requires_grad_(False)
        actual = task.gradients()
    rest = Task(case)
    for name in list(rest.chain._modules)[:2]:
        del rest.chain._modules[name]
    fed = rest.model.stem
    rest.model.stem = nn.Sequential(fed, *first).requires_grad_(False)
    with engine.attach(rest.model, rest.chains):
        expected = rest.gradients()
    trained = {name: g for name, g in actual.items() if g is not None}
    assert_equal_gradients(trained, {name: g for name, g in expected.items() if g is not None})


@feature("unused parameters")
def unused(engine: Engine, case: Case) -> None:
    """A parameter that no loss depends on gets no gradient, and the others the same as ever."""
    task = Task(case)
    owners = {"": task.model, **{f"{task.chains[0]}.{name}.": block for name, block in task.chain.named_children()}}
    for owner in owners.values():
        owner.register_parameter("unused", nn.Parameter(torch.zeros(3, device=case.device)))
    with engine.attach(task.model, task.chains):
        actual = task.gradients()
    none = dict.fromkeys(f"{path}unused" for path in owners)
    assert_equal_gradients(actual, reference(engine, case) | none)


@feature("tied parameters")
def tied(engine: Engine, case: Case) -> None:
    """A parameter in two places gets the sum of what two equal ones get."""
    separate, together = Task(case), Task(case)
    inside = [(name, p.shape) for name, p in separate.model.named_parameters() if name.startswith(case.chain)]
    first, second = next((a, b) for (a, one), (b, other) in combinations(inside, 2) if one == other)
    with torch.no_grad():
        separate.model.get_parameter(second).copy_(separate.model.get_parameter(first))
    path, _, attribute = second.rpartition(".")
    setattr(together.model.get_submodule(path), attribute, together.model.get_parameter(first))
    with engine.attach(separate.model, separate.chains), engine.attach(together.model, together.chains):
        expected, actual = separate.gradients(), together.gradients()
    twice = expected.pop(second)
    expected[first] = total_of({first: expected[first]}, {first: twice})[first]
    assert_equal_gradients(actual, expected)


@feature("weight_norm", families=(RESIDUAL, LAYERS))
def parametrized(engine: Engine, case: Case) -> None:
    """Parameters that weights are computed from get the weights' gradients, pulled back."""
    plain, task = Task(case), Task(case)
    linear = [path for path, module in task.chain.named_modules() if isinstance(module, nn.Linear)]
    for path in linear:
        weight_norm(task.chain.get_submodule(path))
    with engine.attach(plain.model, plain.chains), engine.attach(task.model, task.chains):
        expected, actual = plain.gradients(), task.gradients()
    for path in linear:
        layer, name = task.chain.get_submodule(path), f"{task.chains[0]}.{path}"
        sources = dict(layer.named_parameters(prefix=name))
        del sources[f"{name}.bias"]
        pulled = torch.autograd.grad(layer.weight, list(sources.values()), expected.pop(f"{name}.weight"))
        expected |= dict(zip(sources, pulled, strict=True))
    assert_equal_gradients(actual, expected)


@feature("checkpointing inside blocks", families=(RESIDUAL,))
def checkpoint_inside(engine: Engine, case: Case) -> None:
    """``torch.utils.checkpoint`` around what a block calls changes no gradient."""
    with attached(engine, case) as task:
        for block in task.chain.children():
            for part in block.children():
                part.forward = _checkpointed(part.forward)
        actual = task.gradients()
    assert_equal_gradients(actual, reference(engine, case))


@feature("checkpointing around each block", families=(RESIDUAL, LAYERS))
def checkpoint_around_blocks(engine: Engine, case: Case) -> None:
    """``torch.utils.checkpoint`` around the call of each block changes no gradient."""
    with attached(engine, case) as task:
        h = task.model.stem(task.x)
        for block in task.chain.children():
            h = checkpoint(block, h, use_reentrant=False)
        actual = task.gradients((h * task.model.heads[-1]).flatten(1).sum(1).pow(2).sum())
    assert_equal_gradients(actual, reference(engine, case))


@feature("checkpointing around the model")
def checkpoint_around(engine: Engine, case: Case) -> None:
    """``torch.utils.checkpoint`` around the model changes no gradient."""
    with attached(engine, case) as task:
        out = checkpoint(task.model, task.x.requires_grad_(), use_reentrant=False)
        actual = task.gradients(out.pow(2).sum())
    assert_equal_gradients(actual, reference(engine, case))


@feature("lean=True")
def lean(engine: Engine, case: Case) -> None:
    """The gradients are the same."""
    task = Task(case)
    with engine.attach(task.model, task.chains, lean=True):
        actual = task.gradients()
    assert_equal_gradients(actual, reference(engine, case))


@feature("torch.func.functional_call")
def functional_call(engine: Engine, case: Case) -> None:
    """Parameters from outside, in place of the model's own, get the gradients that they would get inside."""
    with attached(engine, case) as task:
        given = {name: (1.5 * p.detach()).requires_grad_() for name, p in task.model.named_parameters()}
        torch.func.functional_call(task.model, given, (task.x,)).pow(2).sum().backward()
        task.model.load_state_dict(given)
        assert_equal_gradients({name: p.grad for name, p in given.items()}, task.gradients())


@feature("copy.deepcopy while attached")
def deepcopy(engine: Engine, case: Case) -> None:
    """The copy has the engine, and weights of its own."""
    with attached(engine, case) as task:
        expected = task.gradients()
        other = Task(case)
        other.model = copy.deepcopy(task.model)
        with torch.no_grad():
            for parameter in task.model.parameters():
                parameter.zero_()
        assert_equal_gradients(other.gradients(), expected)


@feature("pickle while attached")
def pickled(engine: Engine, case: Case) -> None:
    """What is saved is the model without the engine, which can be attached to it anew."""
    with attached(engine, case) as task:
        other = Task(case)
        other.model = pickle.loads(pickle.dumps(task.model))
        expected = task.gradients()
    with engine.attach(other.model, other.chains):
        assert_equal_gradients(other.gradients(), expected)


@feature("load_state_dict while attached")
def load_state_dict(engine: Engine, case: Case) -> None:
    """Weights from a file replace those of the model, and the gradients are theirs."""
    with attached(engine, case) as task:
        file = io.BytesIO()
        torch.save(task.model.state_dict(), file)
        file.seek(0)
        with torch.no_grad():
            for parameter in task.model.parameters():
                parameter.mul_(2.0)
        task.model.load_state_dict(torch.load(file, weights_only=True))
        assert_equal_gradients(task.gradients(), reference(engine, case))


@feature("model.to() while attached")
def moved(engine: Engine, case: Case) -> None:
    """The gradients are those of a model that was converted first."""
    with attached(engine, case) as task:
        task.gradients()
        task.model.float()
        task.x = task.x.float()
        actual = task.gradients()
    assert_equal_gradients(actual, reference(engine, case, torch.float32), tolerance=1e-6)


@feature("EngineOptimizer with a scheduler")
def engine_optimizer(engine: Engine, case: Case) -> None:
    """The weights are those of a loop with the engine attached and the plain optimizer."""

    def train(task: Task, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=8)
        for _ in range(6):
            optimizer.zero_grad()
            task.loss().backward()
            optimizer.step()
            scheduler.step()
        return {name: p.detach() for name, p in task.model.named_parameters()}

    task = Task(case)
    with attached(engine, case) as other:
        expected = train(other, torch.optim.AdamW(other.model.parameters()))
    optimizer = EngineOptimizer(torch.optim.AdamW(task.model.parameters()), task.model, engine, chains=task.chains)
    assert_equal_gradients(train(task, optimizer), expected, tolerance=1e-12)
    optimizer.detach()


@feature("torch.compile of each block", families=(RESIDUAL,), slow=True)
def compiled_blocks(engine: Engine, case: Case) -> None:
    """Blocks that are compiled once the engine is attached get the same gradients."""
    _check_compiled(engine, case, lambda task: list(task.chain.children()))


@feature("torch.compile of the model", slow=True)
def compiled_model(engine: Engine, case: Case) -> None:
    """A model that is compiled once the engine is attached gets the same gradients."""
    _check_compiled(engine, case, lambda task: [task.model])


@feature("attaching to a compiled model", slow=True)
def compiled_before(engine: Engine, case: Case) -> None:
    """A model that was compiled before gets the same gradients."""
    task = Task(case)
    task.model.compile(backend="aot_eager")
    with engine.attach(task.model, task.chains):
        assert_equal_gradients(task.gradients(), reference(engine, case))


def _check_compiled(engine: Engine, case: Case, chosen: Callable[[Task], list[nn.Module]]) -> None:
    from torch._dynamo.utils import counters  # It takes a second.

    expected = reference(engine, case)
    # What was compiled before, for other models, would count against the limit of recompilations.
    torch._dynamo.reset()
    counters.clear()
    with attached(engine, case) as task:
        for module in chosen(task):
            module.compile(backend="aot_eager")
        actual = task.gradients()
    require(counters["aot_autograd"]["ok"] > 0, "nothing was compiled")
    assert_equal_gradients(actual, expected)


def _checkpointed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)
