import copy

import pytest
import torch
from chains import plain_model
from torch import nn

import gradfree


def loss_fn(out, target):
    return (out - target).pow(2).sum()


@pytest.fixture
def batch():
    return torch.randn(4, 6), torch.randn(4)


def test_figures_are_those_of_the_definition(batch):
    model = plain_model()
    engine = gradfree.create_engine("truncated", window=2)
    fidelity = gradfree.gradient_fidelity(engine, model, loss_fn, batch)

    def grads():
        model.zero_grad()
        loss_fn(model(batch[0]), batch[1]).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    exact = grads()
    with engine.attach(model):
        approximate = grads()
    assert fidelity.parameters.keys() == exact.keys()
    for name, g in exact.items():
        a, f = approximate[name].flatten(), fidelity.parameters[name]
        assert f.norm_ratio == pytest.approx((a.norm() / g.norm()).item())
        assert f.relative_error == pytest.approx(((a - g.flatten()).norm() / g.norm()).item())
        if a.any():
            assert f.cosine == pytest.approx(torch.cosine_similarity(a, g.flatten(), 0).item())
    whole = [torch.cat([g[n].flatten() for n in exact]) for g in (approximate, exact)]
    assert fidelity.total.cosine == pytest.approx(torch.cosine_similarity(*whole, 0).item())


def test_the_chains_own_parameters_are_judged_apart_from_the_rest(batch):
    """The head is exact under every engine; it must not make an engine look good."""
    model = plain_model()
    fidelity = gradfree.gradient_fidelity(gradfree.create_engine("truncated", window=1), model, loss_fn, batch)
    assert fidelity.parameters["heads.4"].relative_error == 0.0
    assert fidelity.chains.relative_error > fidelity.total.relative_error > 0.0


def test_an_exact_engine_has_cosine_and_norm_ratio_1(batch):
    fidelity = gradfree.gradient_fidelity(
        gradfree.create_engine("highway_bp", iterations=5), plain_model(), loss_fn, batch
    )
    for f in (fidelity.total, *fidelity.parameters.values()):
        assert f.cosine == pytest.approx(1.0)
        assert f.norm_ratio == pytest.approx(1.0)
        assert f.relative_error < 1e-10


def test_it_leaves_no_trace_and_gives_both_passes_the_same_dropout_masks():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh()) for _ in range(3))
    )
    x, target = torch.randn(8, 6), torch.randn(8, 6)
    model(x).sum().backward()
    before = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    fidelity = gradfree.gradient_fidelity(
        gradfree.create_engine("fixed_point", iterations=3), model, loss_fn, (x, target), chains=[""]
    )
    assert fidelity.total.relative_error < 1e-10
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before[0].items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])
    assert not any(m._forward_hooks for m in model.modules())


def test_buffers_that_the_model_replaces_are_restored_and_sparse_gradients_compared():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 6, sparse=True)
            self.blocks = plain_model(3).blocks
            self.register_buffer("calls", torch.ones(()))

        def forward(self, tokens):
            self.calls = self.calls + 1
            h = self.embedding(tokens) * self.calls
            for block in self.blocks:
                h = block(h)
            return h

    model = Counting()
    before = model.calls
    fidelity = gradfree.gradient_fidelity(
        gradfree.create_engine("backprop"), model, loss_fn, (torch.randint(5, (4,)), torch.randn(4, 6))
    )
    assert fidelity.total.relative_error < 1e-10
    assert model.calls is before
    assert before == 1


def test_a_frozen_model_is_refused(batch):
    model = plain_model().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        gradfree.gradient_fidelity(gradfree.create_engine("backprop"), model, loss_fn, batch)


def test_it_prints_as_a_table(batch):
    text = str(gradfree.gradient_fidelity(gradfree.create_engine("backprop"), plain_model(), loss_fn, batch))
    assert text.splitlines()[0].split() == ["parameter", "cosine", "norm", "ratio", "relative", "error"]
    assert "blocks.0.linear.weight   1.0000" in text
    assert text.splitlines()[-1].startswith("all")


def test_an_engine_that_has_learnt_something_is_judged_with_it(batch):
    """Random feedback that training began with is compared, not one that is drawn for the occasion."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    engine = gradfree.create_engine("dfa")

    def loss(out, target):
        return (out.sum(1) - target).pow(2).sum()

    fresh = gradfree.gradient_fidelity(engine, model, loss, batch, [""]).parameters["0.weight"].cosine
    with engine.attach(model, [""]) as handle:
        loss(model(batch[0]), batch[1]).backward()
        kept = {"": {name: -feedback for name, feedback in handle.state_dict()[""].items()}}
    turned = gradfree.gradient_fidelity(engine, model, loss, batch, [""], kept).parameters["0.weight"].cosine
    assert turned == pytest.approx(-fresh)
    with pytest.raises(ValueError, match="no chains \\['head'\\] here"):
        gradfree.gradient_fidelity(engine, model, loss, batch, [""], {"head": {}})
    gradfree.gradient_fidelity(gradfree.create_engine("backprop", plain=True), model, loss, batch, None, {})


def test_a_temperature_is_in_the_exact_gradients_too():
    """Both are those of the loss that is trained."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    gradfree.orthogonalize(model)
    batch = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    engine = gradfree.create_engine("foton", temperature=4.0)
    fidelity = gradfree.gradient_fidelity(engine, model, nn.functional.cross_entropy, batch)
    assert fidelity.total.cosine == pytest.approx(1.0)
    assert fidelity.total.norm_ratio == pytest.approx(1 / 4)
    assert not any(layer._forward_hooks for layer in model)
