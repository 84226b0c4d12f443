"""Layers anywhere in a model that send the error back through other weights."""

import copy
import gc

import pytest
import torch
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.algorithms import FA
from gradfree.testing.cases.models import assert_equal_gradients

FEEDBACK = ("random", "sign", "usf", "brsf", "frsf", "learned")


def convolutions():
    """Strides, groups, dilation, all paddings; in-place operations after a layer; transposed layers of odd sizes."""
    return nn.Sequential(
        *(nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.ReLU(inplace=True)),
        *(nn.Conv2d(6, 6, (2, 3), dilation=2, padding="same"), nn.Tanh(), nn.Conv2d(6, 4, 2, padding="valid")),
        *(nn.Conv2d(4, 4, (2, 4), padding="same", padding_mode="reflect"), nn.Tanh()),
        *(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=4), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.ConvTranspose2d(4, 6, 3, 2, padding=1, output_padding=1, groups=2), nn.Tanh()),
        nn.ConvTranspose2d(6, 2, 3, stride=1, dilation=2, output_padding=1),
    )


class Resized(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv1d(3, 4, 3, 3, padding=2), nn.ConvTranspose1d(4, 3, 4, 3, dilation=2)

    def forward(self, x):
        return self.up(input=torch.tanh(self.down(input=x)), output_size=[20])


class Residual(nn.Module):
    """A residual CNN; one layer runs twice."""

    def __init__(self):
        super().__init__()
        self.stem, self.shared = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.stem(x)
        for _ in range(2):
            h = h + torch.relu(self.norm(self.shared(h)))
        return self.head(h.mean((-2, -1)))


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 3))


NETS = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)), (4, 6, 5)),
    "convolutions": (convolutions, (2, 4, 9, 10)),
    "one sample": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding=1, padding_mode="replicate")), (2, 7)),
    "1d, output_size": (Resized, (2, 3, 11)),
    "3d": (lambda: nn.Sequential(nn.Conv3d(2, 3, 3, 2, 1), nn.Tanh(), nn.ConvTranspose3d(3, 2, 2, 2)), (2, 2, 5, 6, 7)),
    "residual": (Residual, (2, 2, 5, 5)),
    "transformer": (transformer, (2, 5, 6)),
}


def grads(model, x, run=None):
    """Return the gradients of a nonsymmetric loss for weights and input, with the same dropout masks."""
    model.zero_grad()
    torch.manual_seed(3)
    given = x.clone().requires_grad_()
    out = (run or model)(given)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out).sin()).sum().backward()
    return {**{name: p.grad for name, p in model.named_parameters()}, "x": given.grad}


def differs(a, b):
    return any(not torch.allclose(a[name], b[name]) for name in a)


@pytest.mark.parametrize("feedback", FEEDBACK)
@pytest.mark.parametrize("kind", NETS)
def test_with_the_layers_weights_as_feedback_gradients_are_exact(kind, feedback):
    make, shape = NETS[kind]
    model, x = make(), torch.randn(shape)
    before = grads(model, x)
    with FA(feedback=feedback).attach(model) as handle:
        assert differs(grads(model, x), before)
        matrices = handle.chains[""].feedback_weights()
        with torch.no_grad():
            for path, matrix in matrices.items():
                model.get_submodule(path).weight.copy_(matrix)
        if feedback == "learned":
            handle.load_state_dict({"": {f"learned: {path}": torch.zeros_like(m) for path, m in matrices.items()}})
        actual = grads(model, x)
    assert_equal_gradients(actual, grads(model, x))


def test_exact_gradients_use_the_weight_of_the_forward_pass():
    """The weight of a power iteration is another one in each pass."""
    model, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)), torch.randn(4, 5)
    nn.utils.parametrizations.spectral_norm(model[2], n_power_iterations=1)
    expected = grads(copy.deepcopy(model), x)
    with FA().attach(model) as handle, handle.exactly():
        assert_equal_gradients(grads(model, x), expected)


def test_a_layer_with_a_forward_of_yours_keeps_it_and_its_exact_gradients():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
    model[0].forward = own = lambda x: nn.Linear.forward(model[0], 2 * x)
    with FA().attach(model) as handle:
        assert list(handle.blocks) == ["2"]
        assert model[0].forward is own
    assert model[0].forward is own


def test_settings_of_a_convolution_that_change_later_are_those_of_the_next_pass():
    x = torch.randn(2, 2, 8, 8)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    with FA().attach(model) as handle:
        grads(model, x)
        model[2].dilation = model[2].padding = (2, 2)
        with handle.exactly():
            found = grads(model, x)
    assert_equal_gradients(found, grads(model, x))


@pytest.mark.parametrize("feedback", ["learned", "mirror"])
def test_layers_that_grow_or_are_replaced_leave_the_feedback_of_the_others_moving(feedback):
    """Also if nothing else keeps the replaced layer. The rate is zero, so that only feedback changes the gradient."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    FA(feedback=feedback, decay=0.5).attach(model)
    x = torch.randn(4, 5)
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        before = grads(model, x)["0.weight"].clone()
        optimizer.step()
        assert not torch.allclose(grads(model, x)["0.weight"], before)
        model[2].weight, model[2].bias = nn.Parameter(torch.randn(7, 6)), nn.Parameter(torch.randn(7))
        model[4] = nn.Linear(7, 3)
        gc.collect()


def test_weights_that_changed_between_the_passes_are_refused():
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
    with FA(feedback="sign").attach(model):
        out = model(torch.randn(4, 5))
        with torch.no_grad():
            model[2].weight.neg_()
        with pytest.raises(ChainError, match="the weights or the output of 2 were changed in place"):
            out.sum().backward()


def test_each_kind_of_feedback_follows_its_definition():
    model = nn.Sequential(nn.Linear(4, 3), nn.ConvTranspose1d(4, 2, 3, 2, groups=2), nn.Conv1d(4, 2, 3, groups=2))
    signs, fan_in = [layer.weight.sign() for layer in model], (4, 3, 6)
    of = {}
    for feedback in FEEDBACK:
        with FA(feedback=feedback).attach(model) as handle:
            of[feedback] = handle.chains[""].feedback_weights().values()
    for n, weight in enumerate(layer.weight for layer in model):
        found = {feedback: list(matrices)[n] for feedback, matrices in of.items()}
        torch.testing.assert_close(found["sign"], signs[n] * weight.abs().mean())
        torch.testing.assert_close(found["usf"], signs[n] * (2 / fan_in[n]) ** 0.5)
        assert found["random"].abs().max() <= (3 / fan_in[n]) ** 0.5
        torch.testing.assert_close(found["frsf"], signs[n] * 2**0.5 * found["random"].abs())
        torch.testing.assert_close(found["learned"], found["random"])
        assert found["brsf"].abs().max() <= (6 / fan_in[n]) ** 0.5
        assert torch.equal(found["brsf"].sign(), signs[n])
        assert found["brsf"].abs().unique().numel() > 1


def steps(model, engine, count, accumulate=1):
    """Train, and yield the feedback after each step."""
    optimizer = gradfree.EngineOptimizer(torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.1), model, engine)
    for n in range(count * accumulate):
        model(torch.randn(4, 5)).pow(2).sum().backward()
        if n % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
            yield optimizer.handle.chains[""].feedback_weights()
    optimizer.detach()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_learned_feedback_gets_the_weights_updates_and_aligns_with_them(accumulate):
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    before = model[2].weight.detach().clone()
    with FA(feedback="learned").attach(model) as handle:
        apart = handle.chains[""].feedback_weights()["2"] - before
    for found in steps(model, FA(feedback="learned", decay=0.2), 5, accumulate):
        left = found["2"] - model[2].weight.detach()
        torch.testing.assert_close(left, 0.8 * apart, rtol=1e-12, atol=1e-14)
        apart = left
    assert not torch.allclose(model[2].weight, before)


def test_brsf_draws_new_magnitudes_after_each_step_only():
    model, other = (nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(2))
    first, second = ([m["2"].abs() for m in steps(net, FA(feedback="brsf"), 3, 2)] for net in (model, other))
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[1])
    with FA(feedback="brsf").attach(model):
        x = torch.randn(4, 5)
        assert_equal_gradients(grads(model, x), grads(model, x), tolerance=0.0)


@pytest.mark.parametrize("feedback", FEEDBACK)
def test_training_resumes_from_a_checkpoint_bitwise(feedback):
    def run(model, optimizer, batches):
        for x in batches:
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()

    def start(seed):
        torch.manual_seed(0)
        model, engine = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), FA(feedback=feedback, seed=seed)
        return model, gradfree.EngineOptimizer(torch.optim.AdamW(model.parameters(), 0.01), model, engine)

    batches = torch.randn(8, 4, 5)
    model, optimizer = start(0)
    run(model, optimizer, batches[:4])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(model, optimizer, batches[4:])
    # What is drawn once comes from the checkpoint; the seed is needed for later draws.
    resumed, other = start(0 if feedback == "brsf" else 7)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    run(resumed, other, batches[4:])
    assert all(map(torch.equal, resumed.parameters(), model.parameters()))


def test_a_loss_on_tensors_that_hooks_see_is_exact():
    """A loss on a layer's input or output reaches layers before it; hooks may be added at any time."""
    model, x, seen = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), torch.randn(3, 5), []

    def run(x):
        out = model(x)
        return out + sum(given.exp() + returned.cos() for given, returned in seen[-1:])

    hooks = (
        lambda: model[2].register_forward_hook(lambda layer, args, out: seen.append((args[0], out))),
        lambda: model[2].register_forward_pre_hook(lambda layer, args: (args[0].sin(),)),
        lambda: model[2].register_full_backward_hook(lambda layer, into, out: (2 * into[0],)),
    )
    for register in hooks:
        with FA().attach(model) as handle, handle.exactly():
            hook = register()
            late = grads(model, x, run)
        expected = grads(model, x, run)
        with FA().attach(model) as handle, handle.exactly():
            assert_equal_gradients(grads(model, x, run), expected)
        assert_equal_gradients(late, expected)
        hook.remove()
        seen.clear()


class Scaled(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(2 * x, weight, bias)


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(2 * x)


def test_modules_that_are_not_replaced_stay_exact_and_are_listed():
    model, x = nn.Sequential(transformer(), Own(3, 3), nn.Unflatten(1, (5, 1)), nn.Flatten(1, 2), Scaled(5, 2, 1)), None
    x = torch.randn(2, 5, 6)
    report = FA().validate(model, batch=x)
    (note,) = report.notes
    for path in ("0.1.layers.0.self_attn (MultiheadAttention)", "1 (Own)", "4 (Scaled)"):
        assert path in note
    assert list(report.chains[""].blocks) == [
        "0.0",
        *(f"0.1.layers.{n}.linear{k}" for n in (0, 1) for k in (1, 2)),
        "0.2",
    ]
    assert set(report.chains[""].blocks) == report.chains[""].solved
    with pytest.raises(ChainError, match="no chain that can be found"):
        FA().attach(Own(3, 3))


def test_only_named_modules_are_replaced_and_no_layer_twice():
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))), torch.randn(2, 4)
    expected = grads(model, x)
    with FA().attach(model, ["1"]) as handle:
        assert list(handle.chains["1"].blocks) == ["1.0"]
        found = grads(model, x)
        with pytest.raises(ChainError, match=r"1\.0 has an engine attached already"):
            FA().attach(model)
    assert differs({"0.0.weight": found["0.0.weight"]}, expected)
    assert_equal_gradients(
        {n: found[n] for n in ("1.0.weight", "2.0.weight")}, {n: expected[n] for n in ("1.0.weight", "2.0.weight")}
    )
    with gradfree.create_engine("dfa").attach(model, [""]), pytest.raises(ChainError, match=r"0\.0 has an engine"):
        FA().attach(model)


def test_wrong_options_and_uses_are_refused():
    for options, error in (
        ({"feedback": "randm"}, ValueError),
        ({"feedback": None}, ValueError),
        ({"decay": 0.1}, ValueError),
        ({"feedback": "learned", "decay": 2}, ValueError),
        ({"feedback": "learned", "decay": "1"}, TypeError),
    ):
        with pytest.raises(error, match=r"FA: .*(random|decay)"):
            FA(**options)
    assert FA(feedback="learned").decay == 0.001
    with pytest.raises(ChainError, match="lazy"):
        FA().attach(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ChainError, match="GradientWatch"):
        gradfree.EngineOptimizer(optimizer, model, FA(), watch=gradfree.GradientWatch())
