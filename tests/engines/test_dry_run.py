"""``validate(model, batch=...)`` reports before training what an engine would do, and does not change the model."""

import random

import numpy as np
import pytest
import torch
from oracles import assert_unchanged, snapshot
from torch import nn

import gradfree
from gradfree import ChainError


class Residual(nn.Module):
    """``form`` of a state x and a branch g(x)."""

    def __init__(self, form=torch.add, width=4):
        super().__init__()
        self.form, self.inner = form, nn.Linear(width, width)

    def forward(self, x):
        return self.form(x, torch.tanh(self.inner(x)))


class Stateful(Residual):
    """Draws random numbers of all kinds, changes weights, buffers and attributes, makes a module and sets a hook."""

    def __init__(self):
        super().__init__()
        self.norm, self.calls, self.cache = nn.BatchNorm1d(4), 0, None
        self.means = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        if not self.calls:
            self.norm.register_forward_hook(lambda *_: None)
        self.calls += 1
        self.means[0] += x.detach().mean(0)
        self.means.data = self.means.data * 0.5
        self.cache = x.detach()
        self.made = nn.Identity()
        self.last = x.detach().mean(0)
        noise = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        return x + noise * nn.functional.dropout(self.norm(self.inner(x)))


def blocks(*forms):
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*map(Residual, forms)), nn.Linear(4, 2))


def looked_at(model, batch, engine="highway_bp", **options):
    return gradfree.create_engine(engine).validate(model, batch=batch, **options)


def links(report, path="1"):
    (piece,) = report.findings[path]
    return piece


def test_a_dry_run_changes_nothing():
    model = nn.Sequential(*[Stateful() for _ in range(3)])
    x = torch.randn(5, 4)
    for block in model:
        block.inner(x).sum().backward()
    attributes = [dict(vars(block)) for block in model]
    before, grads = snapshot(model), [block.inner.weight.grad.clone() for block in model]
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    report = looked_at(model, x)
    assert report.ok
    assert_unchanged(model, before)
    assert all(torch.equal(block.inner.weight.grad, g) for block, g in zip(model, grads, strict=True))
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])
    for block, known in zip(model, attributes, strict=True):
        assert vars(block).keys() == known.keys()
        assert all(vars(block)[name] is value for name, value in known.items())


FORMS = {
    "sum": (torch.add, 1.0),
    "half": (lambda x, g: 0.5 * x + g, 0.5),
    "difference": (lambda x, g: g - x, -1.0),
    "none": (lambda x, g: torch.sin(x) + g, 0.0),
}


def test_residual_paths_and_their_shares_are_those_of_dense_jacobians():
    """⟨δK, δF⟩ / ‖δF‖² of each block, with the exact δ from the dense Jacobians of the blocks."""
    chosen = [*FORMS.values(), FORMS["sum"]]
    model, x = blocks(*[form for form, _ in chosen]), torch.randn(1, 4)
    found = links(looked_at(model, x))
    states = [model[0](x)]
    for block in model[1]:
        states.append(block(states[-1]))
    delta = torch.tensor([1.0, 4.0]).sin().div(2) @ model[2].weight.detach()
    for i in reversed(range(5)):
        jacobian = torch.autograd.functional.jacobian(model[1][i], states[i]).reshape(4, 4)
        pulled, factor = delta @ jacobian, chosen[i][1]
        assert found[i].residual == factor
        assert found[i].share == pytest.approx(float(factor * delta @ pulled / (pulled @ pulled)))
        delta = pulled


class Dropping(nn.Module):
    """Computes something between its second and third block."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x):
        for n, layer in enumerate(self.layers):
            x = layer(2 * x if n == 2 else x)
        return x


def test_pieces_are_those_of_the_first_step():
    model = Dropping()
    x = torch.randn(5, 4, requires_grad=True)
    report = looked_at(model, x)
    engine = gradfree.create_engine("highway_bp")
    with engine.attach(model) as handle:
        model(x).sum().backward()
        assert report.chains["layers"].splits == handle.chains["layers"].splits
    pieces = [[link.path for link in piece] for piece in report.findings["layers"]]
    assert pieces == [["layers.0", "layers.1"], ["layers.2", "layers.3"]]
    assert "2 pieces: layers.0 to layers.1, layers.2 to layers.3" in str(report)
    assert "split at layers.2: its input is computed by the model" in str(report)


def test_an_error_of_the_first_step_is_reported_as_a_problem():
    """In the words of the error."""
    model, x = blocks(*[lambda x, g: torch.sin(x) + g] * 3), torch.randn(5, 4)
    engine, chains = gradfree.create_engine("highway_bp"), ["1"]
    assert engine.validate(model, chains).ok
    report = engine.validate(model, chains, batch=x)
    with engine.attach(model, chains), pytest.raises(ChainError) as refused:
        model(x).sum().backward()
    assert report.problems == [str(refused.value)]
    assert f"problem: {refused.value}" in str(report)


class Keyword(nn.Module):
    """Returns its loss together with its output, as Hugging Face models do, and takes keyword arguments."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[Residual() for _ in range(3)])

    def forward(self, x, *, scale, label):
        out = self.layers(scale * x)
        return {"loss": (out - label).pow(2).mean(), "logits": out}


def test_arguments_are_passed_by_position_or_keyword_and_the_models_loss_is_used():
    model, x = Keyword(), torch.randn(5, 4)
    batch = {"x": x, "scale": torch.tensor(2.0), "label": torch.ones(5, 4)}
    (found,) = [looked_at(model, batch).findings["layers"][0][-1]]
    out = model.layers[:-1](2 * x).detach().requires_grad_()
    delta = 2 * (model.layers[-1](out).detach() - 1) / 20
    (pulled,) = torch.autograd.grad(model.layers[-1](out), out, delta)
    assert found.share == pytest.approx(float((delta * pulled).sum() / pulled.pow(2).sum()))
    for arguments in (x, (x,), [x]):
        assert looked_at(model.layers, arguments).findings[""]


def test_a_note_says_what_packed_sequences_run_as():
    """Though a dry run itself needs the whole chain."""
    given = nn.utils.rnn.pack_sequence([torch.randn(length, 3) for length in (90, 60, 31)])
    report = looked_at(nn.LSTM(3, 16).float(), (given.to(torch.float32),), "shooting")
    (note,) = report.notes
    assert note.endswith("runs packed sequences of several lengths in runs, 1 call for each layer and direction.")
    (note,) = looked_at(nn.GRU(3, 4), (given,), "dsf", chains=[""]).notes
    assert note.endswith("as a grid, padded to one length.")
