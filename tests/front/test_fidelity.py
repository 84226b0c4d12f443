from contextlib import nullcontext
from math import isnan

import pytest
import torch
from oracles import assert_unchanged, snapshot
from torch import nn

import gradfree
from gradfree.algorithms import FixedPoint
from gradfree.fidelity import loss_fidelity
from gradfree.testing.cases.models import layered_model, plain_model


def loss_fn(out, target):
    return (out - target).pow(2).sum()


@pytest.fixture
def batch():
    return torch.randn(4, 6), torch.randn(4)


def test_agreements_equal_their_definitions(batch):
    model = plain_model()
    engine = gradfree.create_engine("highway_bp", iterations=0)
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

    def cosine(names):
        whole = [torch.cat([g[n].flatten() for n in names]) for g in (approximate, exact)]
        return pytest.approx(torch.cosine_similarity(*whole, 0).item())

    assert fidelity.total.cosine == cosine(exact)
    assert list(fidelity.layers) == ["stem", *(f"blocks.{i}.linear" for i in range(5)), "heads"]
    layer = "blocks.2.linear"
    assert fidelity.layers[layer].cosine == cosine([f"{layer}.weight", f"{layer}.bias"])
    assert fidelity.layers[layer].cosine != fidelity.parameters[f"{layer}.weight"].cosine


def test_samples_of_a_random_engine_show_its_bias_and_its_spread(batch):
    """forward_gradient is unbiased; half of it is biased by half of the gradient, and has half the spread."""
    model = plain_model(3)
    engine = gradfree.create_engine("forward_gradient")
    once, again = (gradfree.gradient_fidelity(engine, model, loss_fn, batch) for _ in range(2))
    assert str(once) == str(again)
    assert isnan(once.chains.bias)
    many = gradfree.gradient_fidelity(engine, model, loss_fn, batch, samples=200)
    assert many.chains.bias < 0.15 * many.chains.spread
    assert many.chains.relative_error == pytest.approx(many.chains.spread, rel=0.05)
    averaged = gradfree.create_engine("forward_gradient", samples=4)
    better = gradfree.gradient_fidelity(averaged, model, loss_fn, batch, samples=200)
    assert better.chains.spread == pytest.approx(many.chains.spread / 2, rel=0.2)
    assert "spread" in str(many)
    assert "spread" not in str(once)
    biased = gradfree.gradient_fidelity(Halved(iterations=3), model, loss_fn, batch, samples=3)
    assert (biased.chains.bias, biased.chains.spread) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-12))


@pytest.mark.parametrize(("samples", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_wrong_numbers_of_samples_are_refused(samples, error, batch):
    with pytest.raises(error, match="samples must be"):
        gradfree.gradient_fidelity(gradfree.create_engine("dsf"), plain_model(), loss_fn, batch, samples=samples)


class Halved(FixedPoint):
    """An engine that gives parameters half of their gradients."""

    def gradients(self, chain, direct):
        found = super().gradients(chain, direct)
        return found._replace(parameters=[None if g is None else 0.5 * g for g in found.parameters])


class Nothing(FixedPoint):
    """An engine that gives parameters no gradient."""

    def gradients(self, chain, direct):
        found = super().gradients(chain, direct)
        return found._replace(parameters=[None] * len(found.parameters))


def test_a_missing_gradient_is_zero(batch):
    fidelity = gradfree.gradient_fidelity(Nothing(iterations=5), plain_model(), loss_fn, batch)
    assert fidelity.chains.norm_ratio == 0.0
    assert fidelity.chains.relative_error == 1.0


def test_the_chains_parameters_are_compared_separately(batch):
    """The head is exact with every engine, so it must not hide the chains' error."""
    model = plain_model()
    fidelity = gradfree.gradient_fidelity(gradfree.create_engine("truncated", window=1), model, loss_fn, batch)
    assert fidelity.parameters["heads.4"].relative_error == 0.0
    assert fidelity.chains.relative_error > fidelity.total.relative_error > 0.0


def test_it_changes_nothing_and_both_passes_have_the_same_dropout_masks():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh()) for _ in range(3))
    )
    x, target = torch.randn(8, 6), torch.randn(8, 6)
    model(x).sum().backward()
    before, grads, random = snapshot(model), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    fidelity = gradfree.gradient_fidelity(
        gradfree.create_engine("fixed_point", iterations=3), model, loss_fn, (x, target), chains=[""]
    )
    assert fidelity.total.relative_error < 1e-10
    assert_unchanged(model, before)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


class Momentum(nn.Module):
    """Moves the weights of its teacher, as BYOL and MoCo do."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = (nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]) for _ in range(2))
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for own, given in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.lerp_(given, 0.1)
        return self.student(x) - self.teacher(x)


def test_both_passes_begin_from_the_same_weights():
    model, batch = Momentum(), (torch.randn(8, 6), torch.randn(8, 6))
    before, engine = snapshot(model), gradfree.create_engine("fixed_point", iterations=3)
    fidelity = gradfree.gradient_fidelity(engine, model, loss_fn, batch, chains=["student"])
    assert fidelity.total.relative_error < 1e-10
    assert_unchanged(model, before)


class Sequences(nn.Module):
    """Dropout, then a GRU with features as time steps."""

    def __init__(self):
        super().__init__()
        self.dropout, self.rnn = nn.Dropout(0.5), nn.GRU(1, 5)

    def forward(self, x):
        return self.rnn(self.dropout(x).T.unsqueeze(-1))[0]


MODELS = {"layers": layered_model, "blocks": plain_model, "time": Sequences}
OPTIONS = {"backprop": [{"plain": False}], "foton": [{}, {"streaming": True}], "dsf": [{}, {"feedback": "gate"}]}
# target_propagation learns in the passes of gradient_fidelity and not in those of loss_fidelity, so they differ.
ENGINES = [
    (name, options)
    for name in gradfree.list_engines()
    if name != "target_propagation"
    for options in OPTIONS.get(name, [{}])
]


def sum_of_squares(out, target):
    return out.pow(2).sum()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("name", "options"), ENGINES)
def test_loss_fidelity_and_figures_use_the_graph_of_the_loss_and_leave_backward_unchanged(name, options, kind):
    """Fidelity equals that of two separate passes; the engine's state, .grad and the random state do not change."""
    engine, model, x = gradfree.create_engine(name, **options), MODELS[kind](), torch.randn(4, 6)
    if not engine.validate(model).ok:
        pytest.skip("not a chain for this engine")
    target = torch.randn(4, 6)
    expected, random = gradfree.gradient_fidelity(engine, model, sum_of_squares, (x, target)), torch.get_rng_state()
    results = []
    for compare in (True, False):
        torch.set_rng_state(random)
        model.zero_grad()
        with engine.attach(model) as handle, handle.lesson(target, lambda: sum_of_squares(model(x), target)):
            loss = sum_of_squares(model(x), target)
            if compare:
                found = loss_fidelity(loss, model, handle)
                assert handle.state_dict() == {}
                assert all(p.grad is None for p in model.parameters())
            with gradfree.engine_figures() if compare else nullcontext():
                loss.backward()
            kept = [value for own in handle.state_dict().values() for value in own.values()]
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([*grads, *kept, torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for one, other in ((found.total, expected.total), (found.chains, expected.chains)):
        assert one.cosine == pytest.approx(other.cosine, abs=1e-10, nan_ok=True)
        assert one.norm_ratio == pytest.approx(other.norm_ratio, abs=1e-10, nan_ok=True)


def test_with_a_temperature_both_functions_compare_gradients_of_the_same_loss():
    """Orthogonal backprop takes the error without the temperature 4, so its norm ratio is 1/4 and its cosine 1."""
    model, x, target = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(4, 6), torch.randn(4, 3)
    engine = gradfree.create_engine("orthogonal_backprop", temperature=4.0)
    found = [gradfree.gradient_fidelity(engine, model, loss_fn, (x, target))]
    with engine.attach(model) as handle:
        found.append(loss_fidelity(loss_fn(model(x), target), model, handle))
    for fidelity in found:
        assert fidelity.total.cosine == pytest.approx(1.0)
        assert fidelity.total.norm_ratio == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"engine": "highway_bp"}, TypeError, r"engine must be an Engine, from gradfree.create_engine\(name\)"),
        ({"model": torch.relu}, TypeError, "model must be an nn.Module, not a builtin_function_or_method."),
        ({"loss_fn": None}, TypeError, "loss_fn must be a function of outputs and target, not None"),
        ({"loss_fn": lambda out, y: out}, TypeError, "one number with a gradient, a scalar tensor, not a tensor of sh"),
        ({"loss_fn": lambda out, y: out.sum().detach()}, TypeError, "must return one number with a gradient"),
        ({"batch": torch.zeros(4, 6)}, TypeError, r"batch must be a tuple, .*inputs, target.*, not a Tensor"),
        ({"batch": (torch.zeros(1),)}, ValueError, r"batch must be a tuple, \(\*inputs, target\), but has 1 of these"),
        ({"chains": [3]}, gradfree.ChainError, "chains must be a list of module paths"),
    ],
)
def test_wrong_arguments_raise_and_are_named(wrong, error, message):
    right = {
        "engine": gradfree.create_engine("highway_bp"),
        "model": plain_model(),
        "loss_fn": torch.nn.functional.mse_loss,
        "batch": (torch.randn(4, 6), torch.randn(4, 6)),
    }
    with pytest.raises(error, match=message):
        gradfree.gradient_fidelity(**right | wrong)


@pytest.mark.parametrize("batched", [False, True])
def test_the_cotangents_of_block_outputs_are_compared_block_by_block(batched):
    """After one sweep only the last two blocks have cotangents, which are exact."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(5)))
    engine = gradfree.create_engine("fixed_point", iterations=1)
    with engine.attach(model, [""], batched=batched) as handle:
        found = loss_fidelity(model(torch.randn(4, 3)).pow(2).sum(), model, handle).states
    assert [*found] == ["0", "1", "2", "3", "4"]
    assert [state.norm_ratio for state in found.values()] == pytest.approx([0.0, 0.0, 0.0, 1.0, 1.0])
    assert [state.cosine for state in found.values()][3:] == pytest.approx([1.0, 1.0])


def test_feedback_weights_are_compared_with_the_layers_weights():
    model, x = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30)), torch.randn(4, 30)
    engine = gradfree.create_engine("fa", feedback="sign")
    found = gradfree.gradient_fidelity(engine, model, sum_of_squares, (x, None))
    signs = [(m.weight.abs().sum() / (30 * m.weight.norm())).item() for m in (model[0], model[2])]
    assert [*found.feedback] == ["0", "2"]
    assert [*found.feedback.values()] == pytest.approx(signs)
    assert found.states["2"].cosine == pytest.approx(1.0)
    assert not gradfree.gradient_fidelity(gradfree.create_engine("dfa"), model, sum_of_squares, (x, None)).feedback
