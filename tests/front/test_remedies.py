"""Remedies work: every engine and option that a refusal names is tried on the refused model."""

import re

import pytest
import torch
from torch import nn

import gradfree


class Block(nn.Module):
    def __init__(self, before=6, after=6):
        super().__init__()
        self.inner = nn.Linear(before, after)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Plain(Block):
    def forward(self, x):
        return torch.tanh(self.inner(x))


class Keeping(Block):
    def forward(self, x):
        self.kept = torch.tanh(self.inner(x))
        return x + self.kept


class InPlace(Block):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return x + self.norm(self.inner(x))


def blocks(kind, *sizes):
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(*([kind(*s) for s in sizes] or [kind() for _ in range(3)])))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gated, self.plain = nn.LSTM(6, 6), nn.RNN(6, 6)

    def forward(self, x):
        return self.plain(self.gated(x.view(4, 1, 6))[0])[0]


REFUSED = {
    "no residual path": (lambda: blocks(Plain), "highway_bp", ["1"], {"fixed_point", "truncated"}),
    "no residual path, segments": (lambda: blocks(Plain), "highway_bp segments", ["1"], {"fixed_point", "truncated"}),
    "nothing to take apart": (lambda: blocks(Block), "foton", None, {"fixed_point", "truncated"}),
    "nothing in time": (lambda: blocks(Block), "shooting", None, {"fixed_point", "truncated"}),
    "no gate": (Recurrent, "highway_bp", None, {"dsf", "fixed_point", "truncated"}),
    "segments in time": (Recurrent, "fixed_point segments", None, {"shooting"}),
    "a loss inside": (lambda: blocks(Keeping), "highway_bp", None, {"backprop"}),
    "in place": (lambda: blocks(InPlace), "highway_bp", None, {"backprop"}),
    "samples that mix": (lambda: blocks(Normed), "deeppcr", None, {"backprop"}),
    "states that widen": (lambda: blocks(Plain, (6, 4), (4, 8), (8, 2)), "dsf", None, {"fixed_point", "truncated"}),
}


def engine_of(words):
    name, *segmented = words.split()
    return gradfree.create_engine(name, **({"segments": 2} if segmented else {}))


def step(engine, model, chains=None, **attached):
    torch.manual_seed(1)
    with engine.attach(model, chains, **attached):
        out = model(torch.randn(4, 6))
        kept = [module.kept.pow(2).sum() for module in model.modules() if isinstance(module, Keeping)]
        sum(kept, out.sum()).backward()


@pytest.fixture(params=REFUSED)
def refused(request):
    """The error of a first step, and a function that creates the model."""
    build, words, chains, named = REFUSED[request.param]
    with pytest.raises(gradfree.ChainError) as error:
        step(engine_of(words), build(), chains)
    return str(error.value), build, words, chains, named


def test_every_engine_that_a_refusal_names_works_on_that_model(refused):
    message, build, _, chains, expected = refused
    named = set(re.findall(r"'(\w+)'", message)) & set(gradfree.list_engines())
    assert named >= expected
    for name in named:
        step(gradfree.create_engine(name), build(), chains)


def test_every_option_that_a_refusal_names_works_on_that_model(refused):
    message, build, words, chains, _ = refused
    if "residual=1.0" in message:
        step(engine_of(words), build(), chains, residual=1.0)
    if found := re.search(r"chains=(\['.+?'\])", message):
        step(engine_of(words), build(), eval(found[1]))


def test_chains_that_a_message_suggests_can_be_attached():
    """Not every container is a chain of single layers."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Sequential(Block(), Block()))
    (problem,) = gradfree.create_engine("pepita").validate(model).problems
    assert "What can be named, chains=[...]: ['0']" in problem
    assert gradfree.create_engine("pepita").validate(model, ["0"]).ok


def test_an_engine_that_is_already_attached_is_reported_once():
    model = blocks(Block)
    with gradfree.create_engine("dsf").attach(model):
        problems = gradfree.create_engine("highway_bp").validate(model).problems
    assert problems == ["1.0 has an engine attached already: call detach() on its handle first."]
