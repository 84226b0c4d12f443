"""Which chains are found automatically, and how others are named; with k = L their gradients equal autograd's."""

import pytest
import torch
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import Plain, assert_equal_gradients, gradients

ENGINE = gradfree.create_engine("highway_bp", iterations=9)


class Rows(nn.Module):
    """Runs all its arguments, modules or containers of modules, one after the other."""

    def __init__(self, **parts):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.order = list(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        x = self.stem(x)
        for name in self.order:
            part = getattr(self, name)
            blocks = part.values() if isinstance(part, nn.ModuleDict) else part
            for block in [part] if isinstance(part, nn.Sequential | Plain | Stage) else blocks:
                x = block(x)
        return x


class Stage(nn.Module):
    """Changes the width, then runs a chain."""

    def __init__(self, before, width, depth):
        super().__init__()
        self.project, self.layers = nn.Linear(before, width), nn.ModuleList(Plain(width) for _ in range(depth))

    def forward(self, x):
        x = self.project(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Branched(Plain):
    """A block whose branch is a sequence of blocks."""

    def __init__(self, width=6):
        super().__init__(width)
        self.body = nn.Sequential(Plain(width), Plain(width))

    def forward(self, x):
        return x + torch.tanh(self.body(x))


def row(depth=3):
    return [Plain() for _ in range(depth)]


def aliased():
    """A block in several places, and three names for their container, one of them inside another module."""
    block = Plain()
    model = Rows(blocks=nn.ModuleList([block, Plain(), block, block]))
    model.backbone = model.blocks
    model.other = nn.ModuleDict({"same": model.blocks})
    return model


MODELS = {
    "several": (lambda: Rows(first=nn.Sequential(*row()), second=nn.ModuleList(row(2))), ["first", "second"]),
    "an alias": (aliased, ["blocks"]),
    "one block in all places": (lambda: Rows(blocks=nn.Sequential(*[Plain()] * 4)), ["blocks"]),
    "stages": (
        lambda: Rows(stages=nn.ModuleList([Stage(6, 4, 2), Stage(4, 8, 3), Stage(8, 5, 2)])),
        ["stages.0.layers", "stages.1.layers", "stages.2.layers"],
    ),
    "blocks with rows in their branches": (lambda: Rows(blocks=nn.Sequential(Branched(), Branched())), ["blocks"]),
}


def assert_exact(model, chains=None, engine=ENGINE):
    x = torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with engine.attach(model, chains) as handle:
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)
        assert all(site.solved for site in handle.chains.values())
    return handle


@pytest.mark.parametrize("name", MODELS)
def test_chains_that_are_found(name):
    make, chains = MODELS[name]
    assert list(ENGINE.validate(make()).chains) == chains
    assert_exact(make())


def dense(*widths):
    return (nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6)) for width in widths)


def test_a_sequential_of_equal_sequentials_is_a_chain():
    """Not so in a ModuleList, where they may be experts, nor if they differ, as stages do."""
    engine = gradfree.create_engine("fixed_point", iterations=2)
    assert list(assert_exact(nn.Sequential(*dense(5, 5, 5)), engine=engine).chains) == [""]
    inner = nn.Sequential(nn.Linear(6, 6), nn.Sequential(*dense(5, 5)), nn.Linear(6, 2))
    assert list(assert_exact(inner, engine=engine).chains) == ["1"]
    for other in (
        nn.ModuleList(dense(5, 5)),
        nn.Sequential(*dense(5, 7)),
        nn.Sequential(*(nn.Sequential(*row()),) * 2),
    ):
        assert "" not in engine.validate(other).chains


def test_blocks_that_are_attributes_can_be_named_in_a_list():
    model = Rows(b1=Plain(), b2=Plain(), b3=Plain(), others=nn.Sequential(*row()))
    handle = assert_exact(model, [["b1", "b2", "b3"], "others"])
    assert list(handle.chains) == ["others", "b1, b2, b3"]
    assert not handle.chains["b1, b2, b3"].splits
    with pytest.raises(ChainError, match=r"no module .b7."):
        ENGINE.attach(model, [["b1", "b7"]])
    with pytest.raises(ChainError, match="share a"):
        ENGINE.attach(model, [["b1", "others.0"], "others"])
    with pytest.raises(ChainError, match="empty list"):
        ENGINE.attach(model, [[]])


def test_a_list_of_modules_works_for_layer_engines_and_for_backprop():
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Tanh(), "c": nn.Linear(6, 6)})
    report = gradfree.create_engine("foton").validate(model, [["a", "b", "c"]])
    assert str(report).startswith("chain 'a, b, c': 3 layers, 2 of them with weights")
    assert gradfree.create_engine("backprop").validate(model, [["a", "b", "c"]]).chains == {}


@pytest.mark.parametrize("parts", [(0, 6, 1), (1, 3, 2)])
def test_the_longest_run_of_blocks_of_one_class_in_a_sequential_is_found(parts):
    before, blocks, after = parts
    model = nn.Sequential(
        *(nn.Linear(6, 6) for _ in range(before)),
        *(Plain(6) for _ in range(blocks)),
        *(nn.Linear(6, 6) for _ in range(after)),
    )
    x = torch.randn(4, 6)

    def results():
        return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    expected = results()
    with ENGINE.attach(model) as handle:
        (chain,) = handle.chains.values()
        assert list(chain.blocks) == [str(n) for n in range(before, before + blocks)]
        for found, exact in zip(results(), expected, strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def test_layers_of_torch_in_a_sequential_are_no_run():
    report = ENGINE.validate(nn.Sequential(nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)))
    assert not report.ok
    assert not report.chains


@pytest.mark.parametrize("engine", ["foton", "orthogonal_backprop", "pepita"])
def test_layers_without_numbers_or_with_complex_ones_end_in_a_report(engine):
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3))
    others = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(to) for to in ("meta", torch.complex64)]
    assert any("lazy" in problem for problem in gradfree.create_engine(engine).validate(lazy).problems)
    for model in others:
        assert gradfree.create_engine(engine).validate(model).chains
