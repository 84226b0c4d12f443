"""``torch.compile`` before and after attaching gives the engine's gradients, not those of code compiled without it."""

import pytest
import torch
from lightning_runs import REGISTERED, over, quiet
from plain_modules import Net
from torch import nn

import gradfree
from gradfree.testing.cases.models import assert_equal_gradients, gradients

pytestmark = [quiet, pytest.mark.slow]

ONE_OF_EACH_KIND = {key: REGISTERED[key] for key in ("dfa, layers", "truncated, blocks", "dsf, time")}


@pytest.fixture(autouse=True)
def forget():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(net, way):
    """Compile ``net`` and return the callable."""
    if way == "in a function":
        return torch.compile(lambda x: net(x), backend="eager")
    for part in net.middle.children():
        part.compile(backend="eager")
    return net


@pytest.mark.parametrize("way", ["in a function", "its parts"])
@over(ONE_OF_EACH_KIND)
def test_compiled_models_get_the_engines_gradients(engine, kind, way):
    """Compiled and run before without the engine, then with it, and without it again.

    Models that are compiled in place are asked for in ``gradfree.testing``.
    """
    net, x = Net(kind), torch.randn(5, 6)
    exact = gradients(net, lambda: net(x))
    with engine.attach(net):
        expected = gradients(net, lambda: net(x))
    run = compiled(net, way)
    assert_equal_gradients(gradients(net, lambda: run(x)), exact)
    with engine.attach(net):
        assert_equal_gradients(gradients(net, lambda: run(x)), expected)
    assert_equal_gradients(gradients(net, lambda: run(x)), exact)


def test_the_compiler_does_not_unroll_the_steps_of_a_recorded_layer():
    net, sizes = gradfree.CellLayer(nn.GRUCell(3, 4)), []

    def backend(graph, _):
        sizes[-1] += len(graph.graph.nodes)
        return graph

    with gradfree.create_engine("backprop").attach(net):
        for steps in (3, 9):
            torch.compiler.reset()
            sizes.append(0)
            torch.compile(net, backend=backend)(torch.randn(steps, 2, 3))
    assert sizes[0] == sizes[1]


class Normed(nn.Module):
    def __init__(self, norm, layer):
        super().__init__()
        self.norm, self.layer = norm, layer

    def forward(self, x):
        return x + torch.tanh(self.layer(self.norm(x)))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: Normed(nn.LayerNorm(6), nn.Linear(6, 6)), (6,)),
        (lambda: Normed(nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1)), (6, 4, 4)),
    ],
    ids=["LayerNorm", "BatchNorm2d"],
)
def test_the_last_batch_of_an_epoch_may_be_smaller(make, shape):
    """What torch compiles then would overwrite what a backward pass needs for the next VJP."""
    model = nn.Sequential(*(make() for _ in range(3)))
    batches = [torch.randn(samples, *shape) for samples in (4, 4, 3)]
    with gradfree.create_engine("fixed_point", iterations=3).attach(model, batched=False):
        expected = [gradients(model, lambda x=x: model(x)) for x in batches]
        run = torch.compile(model, backend="aot_eager")
        for x, each in zip(batches, expected, strict=True):
            assert_equal_gradients(gradients(model, lambda x=x: run(x)), each)


def test_a_long_model_of_several_types_stays_below_torchs_limit_of_recompilations():
    activations = (nn.Tanh, nn.ReLU, nn.Sigmoid, nn.GELU)
    model = nn.Sequential(*[kind() for n in range(12) for kind in (lambda: nn.Linear(4, 4), activations[n % 4])])
    x = torch.randn(5, 4)
    with gradfree.create_engine("dfa").attach(model), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        expected = gradients(model, lambda: model(x))
        run = torch.compile(model, backend="eager")
        for _ in range(2):
            assert_equal_gradients(gradients(model, lambda: run(x)), expected)
