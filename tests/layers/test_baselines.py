"""DFA, FA, PEPITA and backpropagation with orthogonal weights: each against the same written down by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from test_foton import dense
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.algorithms import DFA, FA, FOTON, PEPITA, OrthogonalBackprop
from gradfree.orthogonal.weights import drift, project, weights_of
from gradfree.testing.cases.models import assert_equal_gradients, gradients

FEEDBACK = {"dfa": DFA(), "fa": FA(), "pepita": PEPITA(), "pepita, mirrored": PEPITA(mirror_every=1)}
PEPITAS_SCALE = 0.05 * 2**0.5


def convolutions(pool=nn.AvgPool2d):
    """From (N, 2, 8, 8) to (N, 3): strides, circular padding, groups, a pool, tanh."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, 2, padding=1, padding_mode="circular"), nn.Tanh(), nn.Dropout2d(0.3)),
        *(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Tanh(), pool(2), nn.Flatten(), nn.Dropout(0.3)),
        *(nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 3)),
    )


NETS = {
    "linear": (lambda: dense(8, 6, 5, 3), (4, 8)),
    "tanh": (lambda: dense(8, 6, 5, 3, bend=nn.Tanh), (4, 8)),
    "one sample": (lambda: dense(8, 6, 5, 3, bend=nn.Tanh), (1, 8)),
    "dropout": (lambda: dense(8, 6, 5, 3, bend=lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.4))), (4, 8)),
    "convolutions": (convolutions, (4, 2, 8, 8)),
    "max pool": (lambda: convolutions(nn.MaxPool2d), (4, 2, 8, 8)),
    "in one dimension": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding="same"), nn.GELU(), nn.Flatten(), nn.Linear(18, 3)),
        (4, 2, 6),
    ),
}


def run(net, x, engine=None, state=None):
    """Return the gradients, always with the same dropout masks, and what the engine keeps."""
    torch.manual_seed(3)
    if engine is None:
        return gradients(net, lambda: net(x)), {}
    with engine.attach(net, [""]) as handle:
        handle.load_state_dict({"": state or {}})
        found = gradients(net, lambda: net(x))
        return found, handle.state_dict().get("", {})


def with_weights(net):
    return {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)}


def products(net):
    """Return for a chain of linear layers alone W_L ... W_l by l: what leads from what enters l to the output."""
    found, product = {}, torch.eye(net[-1].out_features)
    for i in reversed(range(len(net))):
        product = product @ net[i].weight.detach()
        found[str(i)] = product
    return found


def kept(matrices):
    return {f"{path} {tuple(matrix.shape)}": matrix for path, matrix in matrices.items()}


# Direct feedback alignment.


def test_dfa_with_the_products_of_later_weights_is_backpropagation():
    net, x = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), dense(8, 6, 9, 5, 3)), torch.randn(4, 7)
    expected = gradients(net, lambda: net(x))
    with DFA().attach(net, ["2"]) as handle:
        handle.load_state_dict({"2": kept({f"2.{path}": matrix for path, matrix in products(net[2]).items()})})
        assert_equal_gradients(gradients(net, lambda: net(x)), expected)
        assert len(handle.state_dict()["2"]) == 4


def dfa_by_hand(net, x, matrices):
    """Cut the net behind every activation, and give each piece B e by autograd: a pool or flattening is a piece."""
    cut, found = [], {}
    torch.manual_seed(3)
    h = x
    for path, layer in net.named_modules():
        if isinstance(layer, nn.Sequential):
            continue
        if not isinstance(layer, nn.Tanh | nn.GELU | nn.Dropout | nn.Dropout2d):
            cut.append((path, h))
            h = h.detach().requires_grad_()
        h = layer(h)
    error = 2 * h.detach()
    h.backward(error)
    for path, out in cut:
        key = next((key for key in matrices if key.startswith(f"{path} ")), None)
        if key is not None and out.grad_fn is not None:
            out.backward(torch.stack([sum(e[c] * matrices[key][c] for c in range(len(e))) for e in error]))
            found[key] = True
    assert found.keys() == matrices.keys()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("kind", NETS)
def test_dfa_pulls_each_layers_own_error_through_its_activation(kind):
    make, shape = NETS[kind]
    net, x = make(), torch.randn(shape)
    actual, matrices = run(net, x, DFA())
    assert len(matrices) == len(with_weights(net)) - 1
    net.zero_grad()
    assert_equal_gradients(actual, dfa_by_hand(net, x, matrices))


def test_dfa_sends_what_lies_before_the_chain_its_own_error_through_a_leading_activation():
    net, x = nn.Sequential(nn.Linear(7, 8), nn.Sequential(nn.Tanh(), *dense(8, 6, 3))), torch.randn(4, 7)
    with DFA().attach(net, ["1"]) as handle:
        found = gradients(net, lambda: net(x))
        matrices = handle.state_dict()["1"]
    h = net[0](x)
    delta = 2 * net(x) @ matrices["1.1 (3, 8)"] * (1 - h.tanh() ** 2)
    torch.testing.assert_close(found["0.weight"], delta.T @ x)


# Feedback alignment.


@pytest.mark.parametrize("kind", NETS)
def test_fa_with_the_weights_themselves_is_backpropagation(kind):
    make, shape = NETS[kind]
    net, x = nn.Sequential(nn.Identity(), nn.Tanh(), make()), torch.randn(shape).requires_grad_()
    expected, _ = run(net, x)
    into, x.grad = x.grad, None
    actual, _ = run(
        net, x, FA(), kept({path: layer.weight.detach().clone() for path, layer in with_weights(net).items()})
    )
    assert_equal_gradients({**actual, "x": x.grad}, {**expected, "x": into})


def test_fa_is_written_down_as_lillicrap_does():
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(4, 8)
    actual, matrices = run(net, x, FA())
    assert list(matrices) == ["4 (3, 5)", "2 (5, 6)"]
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    with torch.no_grad():
        for sample in x:
            h1 = net[0](sample).tanh()
            h2 = net[2](h1).tanh()
            d3 = 2 * net[4](h2)
            d2 = (matrices["4 (3, 5)"].T @ d3) * (1 - h2**2)
            d1 = (matrices["2 (5, 6)"].T @ d2) * (1 - h1**2)
            for layer, d, h in ((net[0], d1, sample), (net[2], d2, h1), (net[4], d3, h2)):
                layer.weight.grad += torch.outer(d, h)
                layer.bias.grad += d
    assert_equal_gradients(actual, {name: p.grad for name, p in net.named_parameters()})


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_fa_with_weights_that_are_computed(norm):
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh).eval(), torch.randn(4, 8)
    norm(net[2])
    expected, _ = run(net, x)
    assert_equal_gradients(
        run(net, x, FA(), kept({path: net[int(path)].weight.detach() for path in "24"}))[0], expected
    )


# PEPITA.


def pepita_by_hand(net, x, feedback):
    """The two passes for Linear-Tanh nets, sample by sample, with unit errors."""
    layers = list(with_weights(net).values())
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    with torch.no_grad():
        for sample in x:
            e = 2 * net(sample)
            h, other = sample, sample - feedback @ (e / e.norm())
            for layer in layers[:-1]:
                before, h, other = other, layer(h).tanh(), layer(other).tanh()
                layer.weight.grad += e.norm() * torch.outer(h - other, before)
                layer.bias.grad += e.norm() * (h - other)
            layers[-1].weight.grad += torch.outer(e, other)
            layers[-1].bias.grad += e
    return {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("samples", [1, 3, 9])
def test_pepita_is_its_two_passes(samples):
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(samples, 8)
    actual, matrices = run(net, x, PEPITA())
    assert_equal_gradients(actual, pepita_by_hand(net, x, PEPITAS_SCALE * matrices["0 (3, 8)"].T))


def test_pepitas_feedback_is_a_product_if_it_is_mirrored():
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(4, 8)
    actual, matrices = run(net, x, PEPITA(mirror_every=5))
    product = matrices["4 (3, 5)"] @ matrices["2 (5, 6)"] @ matrices["0 (6, 8)"]
    assert_equal_gradients(actual, pepita_by_hand(net, x, PEPITAS_SCALE * product.T))


@pytest.mark.parametrize("option", [{}, {"mirror_every": 1}])
def test_pepitas_feedback_has_the_published_scale(option):
    """0.05 · √(2/inputs), the standard deviation of 0.05 · U(±√(6/inputs))."""
    net, x = dense(400, 300, 200, 300, bend=nn.Tanh), torch.randn(2, 400)
    _, matrices = run(net, x, PEPITA(**option))
    product = PEPITAS_SCALE * torch.linalg.multi_dot([*matrices.values()][::-1]) if option else None
    found = PEPITAS_SCALE * matrices["0 (300, 400)"] if product is None else product
    assert found.std().item() == pytest.approx(0.05 * (2 / 400) ** 0.5, rel=0.02)
    assert option or found.abs().max().item() == pytest.approx(0.05 * (6 / 400) ** 0.5, rel=0.01)


def test_pepita_with_fotons_feedback_is_foton_but_for_the_presynaptic_side():
    """Linear and orthogonal: h - h̃ = δ, and what is left is (h_l - h̃_l) (h_{l-1} - h̃_{l-1})ᵀ."""
    net, x = dense(9, 8, 8, 4), torch.randn(5, 9)
    gradfree.orthogonalize(net)
    product = products(net)["0"]
    foton, _ = run(net, x, FOTON())
    actual, _ = run(net, x, PEPITA(), kept({"0": product / PEPITAS_SCALE}))
    with torch.no_grad():
        e = 2 * net(x)
        norms = e.norm(dim=1, keepdim=True)
        shift = e / norms @ product
        for i, layer in enumerate(net):
            after = shift @ layer.weight.T if i < 2 else e / norms
            foton[f"{i}.weight"] = foton[f"{i}.weight"] - (norms * after).T @ shift
            shift = after
    assert_equal_gradients(actual, foton)


def test_pepita_on_convolutions_differentiates_at_the_second_passs_inputs():
    """Both passes written down with torch's functions; the masks of the first one in the second."""
    net, x = convolutions(), torch.randn(4, 2, 8, 8)
    actual, matrices = run(net, x, PEPITA())
    masks = {}
    for i in (2, 7):
        net[i].register_forward_hook(
            lambda layer, args, out, i=i: masks.update({i: (out / args[0]).detach().nan_to_num()})
        )
    torch.manual_seed(3)
    e = 2 * net(x).detach()
    norms = e.norm(dim=1)
    shift = torch.einsum("nc,cijk->nijk", e / norms[:, None], PEPITAS_SCALE * matrices["0 (3, 2, 8, 8)"])
    for p in net.parameters():
        p.grad = None
    h, other, waiting = x, (x - shift).detach(), None
    for i, layer in enumerate(net):
        if i == 10:
            layer(other).backward(e)
        elif isinstance(layer, nn.Conv2d | nn.Linear):
            waiting = layer(other)
            h, other = layer(h).detach(), waiting.detach()
        else:
            h, other = (h * masks[i], other * masks[i]) if i in masks else (layer(h).detach(), layer(other))
        if i in (2, 4, 9):
            waiting.backward((h - other) * norms.view(-1, *[1] * (h.dim() - 1)))
    assert_equal_gradients(actual, {name: p.grad for name, p in net.named_parameters()})


def test_pepita_sends_what_lies_before_the_chain_the_inputs_modulation():
    net, x = nn.Sequential(nn.Linear(7, 8), dense(8, 6, 3, bend=nn.Tanh)), torch.randn(4, 7)
    with PEPITA().attach(net, ["1"]) as handle:
        found = gradients(net, lambda: net(x))
        matrix = handle.state_dict()["1"]["1.0 (3, 8)"]
    torch.testing.assert_close(found["0.weight"], (2 * net(x) @ matrix * PEPITAS_SCALE).T @ x)


def cosine(a, b):
    return F.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def test_mirroring_leads_the_feedback_to_the_products_of_the_transposed_weights():
    net = nn.Sequential(nn.Conv2d(2, 8, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(8, 2, 4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    alignment, layers = [], []
    with PEPITA(mirror_every=2, mirror_rate=0.2).attach(net) as handle:
        for step in range(101):
            optimizer.zero_grad()
            F.cross_entropy(net(x), torch.arange(8) % 4).backward()
            if step % 50 == 0:
                state = handle.state_dict()[""]
                other = copy.deepcopy(net)
                for path, layer in with_weights(other).items():
                    layer.weight.data = state[f"{path} {tuple(layer.weight.shape)}"]
                layers.append([cosine(a, b) for a, b in zip(weights(other), weights(net), strict=True)])
                alignment.append(cosine(end_to_end(other), end_to_end(net)))
            optimizer.step()
    assert alignment[0] < 0.3 < 0.5 < alignment[1] < alignment[2]
    assert alignment[2] > 0.8
    assert all(start < 0.3 and end > 0.8 for start, end in zip(layers[0], layers[2], strict=True))


def weights(net):
    return [layer.weight.detach() for layer in with_weights(net).values()]


def end_to_end(net):
    """Return the product of the net's linear parts, inputs × classes."""
    linear = nn.Sequential(*[layer for layer in net if not isinstance(layer, nn.Tanh)])
    with torch.no_grad():
        return linear(torch.eye(32).view(32, 2, 4, 4)) - linear(torch.zeros(1, 2, 4, 4))


def test_mirroring_keeps_norms_and_comes_as_often_as_asked():
    net, x = dense(8, 6, 3, bend=nn.Tanh), torch.randn(4, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    seen = []
    with PEPITA(mirror_every=2).attach(net) as handle:
        for _ in range(4):
            net(x).sum().backward()
            seen.append(handle.state_dict()[""]["0 (6, 8)"])
            optimizer.step()
    assert seen[0] is seen[1]
    assert not torch.equal(seen[1], seen[2])
    torch.testing.assert_close(seen[1].norm(), seen[2].norm())


def test_a_restored_run_mirrors_on_with_the_same_noise():
    def train(net, steps, handle):
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.ones(2, 8)).pow(2).sum().backward()
            optimizer.step()
        return copy.deepcopy(handle.state_dict())

    net = dense(8, 6, 3, bend=nn.Tanh)
    other, engine = copy.deepcopy(net), PEPITA(mirror_every=1)
    with engine.attach(net) as handle:
        expected = train(net, 5, handle)
    with engine.attach(other) as handle:
        state = train(other, 3, handle)
    with engine.attach(other) as handle:
        handle.load_state_dict(state)
        actual = train(other, 2, handle)
    assert all(torch.equal(actual[""][key], value) for key, value in expected[""].items())
    assert expected[""].keys() == actual[""].keys()


# What all engines with random feedback have in common.


@pytest.fixture(params=FEEDBACK.values(), ids=FEEDBACK)
def engine(request):
    return request.param


@pytest.mark.parametrize("kind", NETS)
def test_gradients_are_linear_in_the_loss(engine, kind):
    make, shape = NETS[kind]
    net, x = make(), torch.randn(shape)
    found = {}
    with engine.attach(net, [""]):
        for scale in (1e-4, 1.0, 65536.0):
            torch.manual_seed(3)
            net.zero_grad()
            (scale * net(x).pow(2).sum()).backward()
            found[scale] = {name: p.grad / scale for name, p in net.named_parameters()}
    for scale in (1e-4, 65536.0):
        assert_equal_gradients(found[scale], found[1.0], tolerance=1e-12)


@pytest.mark.parametrize("engine", [*FEEDBACK.values(), FOTON()], ids=str)
def test_a_short_batch_gets_the_mean_gradient_of_its_samples(engine):
    net, x, y = dense(8, 6, 3, bend=nn.Tanh), torch.randn(5, 8), torch.randint(3, (5,))
    with engine.attach(net):
        F.cross_entropy(net(x), y).backward()
        together = {name: p.grad.clone() for name, p in net.named_parameters()}
        net.zero_grad()
        for sample, target in zip(x, y, strict=True):
            (F.cross_entropy(net(sample[None]), target[None]) / 5).backward()
    assert_equal_gradients({name: p.grad for name, p in net.named_parameters()}, together)


def test_no_sample_no_gradient(engine):
    net = dense(8, 6, 3, bend=nn.Tanh)
    found, _ = run(net, torch.randn(0, 8), engine)
    assert all((g == 0).all() for g in found.values())


def test_the_feedback_is_drawn_from_the_seed_and_nothing_else(engine):
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(4, 8)
    _, first = run(net, x, engine)
    torch.manual_seed(7)
    with engine.attach(net) as handle:
        out = net(x)
        state = torch.get_rng_state()
        out.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        again = handle.state_dict()[""]
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    other = type(engine)(seed=1, **({"mirror_every": 1} if engine == FEEDBACK["pepita, mirrored"] else {}))
    _, third = run(net, x, other)
    assert not any(torch.equal(first[key], third[key]) for key in first)
    assert len({matrix.flatten()[0].item() for matrix in first.values()}) == len(first)


def test_steps_of_the_optimizer_leave_the_random_state_alone(engine):
    net = dense(8, 6, 3, bend=nn.Tanh)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with engine.attach(net):
        net(torch.randn(4, 8)).sum().backward()
        state = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), state)


def test_checkpoints_restore_the_feedback(engine):
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(4, 8)
    expected, state = run(net, x, engine)
    expected = {name: g.clone() for name, g in expected.items()}
    other = type(engine)(**{**vars(engine), "seed": 5})
    assert_equal_gradients(run(net, x, other, copy.deepcopy(state))[0], expected, tolerance=0.0)


def test_a_loss_on_an_earlier_state_has_feedback_of_its_own(engine):
    """In between, and of another width; the whole chain's feedback stays."""
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(4, 8)
    with engine.attach(net) as handle:
        expected = {name: g.clone() for name, g in gradients(net, lambda: net(x)).items()}
        before = handle.state_dict()[""]
        part = gradients(net, lambda: net[3](net[2](net[1](net[0](x)))))
        assert part["4.weight"] is None or (part["4.weight"] == 0).all()
        assert part["0.weight"].abs().max() > 0
        assert before.items() <= handle.state_dict()[""].items()
        assert_equal_gradients(gradients(net, lambda: net(x)), expected, tolerance=0.0)


@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_low_precision_computes_nearly_the_same(engine, way):
    torch.set_default_dtype(torch.float32)
    net, x = dense(32, 24, 24, 8, bend=nn.Tanh), torch.randn(16, 32)
    exact, _ = run(net, x, engine)
    exact = {name: g.clone() for name, g in exact.items()}
    if way == "bfloat16":
        rounded, _ = run(copy.deepcopy(net).bfloat16(), x.bfloat16(), engine)
    else:
        with torch.autocast("cpu", torch.bfloat16), engine.attach(net):
            net.zero_grad()
            net(x).float().pow(2).sum().backward()
        rounded = {name: p.grad for name, p in net.named_parameters()}
    for name, g in exact.items():
        assert cosine(rounded[name].float(), g) > 0.999, name


@pytest.mark.parametrize("name", ["dfa", "pepita"])
def test_one_row_of_classes_a_sample_is_wanted(name):
    net = dense(6, 5, 4)
    with gradfree.create_engine(name).attach(net):
        out = net(torch.randn(3, 7, 6))
        with pytest.raises(ChainError, match=r"takes outputs \(samples, classes\), but 1 returns \(3, 7, 4\)"):
            out.sum().backward()


@pytest.mark.parametrize("engine", [FA(), PEPITA(mirror_every=1)])
def test_fa_and_mirrored_pepita_take_outputs_of_any_shape(engine):
    net = dense(6, 5, 4, bend=nn.Tanh)
    found, _ = run(net, torch.randn(3, 7, 6), engine)
    assert all(g.abs().max() > 0 for g in found.values())


def test_pepita_does_not_run_layers_with_a_state_twice():
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 4))
    assert "0 computes its weight with a state of its own" in str(PEPITA().validate(net))
    assert all(engine.validate(net).ok for engine in (DFA(), FA(), OrthogonalBackprop()))


@pytest.mark.parametrize(
    ("engine", "options", "error", "message"),
    [
        ("dfa", {"seed": -1}, ValueError, "DFA: seed must be at least 0, not -1"),
        ("fa", {"seed": "x"}, TypeError, "FA: seed must be an int of at least 0, not 'x'"),
        ("pepita", {"mirror_every": -1}, ValueError, "PEPITA: mirror_every must be at least 0, not -1"),
        ("pepita", {"mirror_rate": 0}, ValueError, "PEPITA: mirror_rate must be positive and finite, not 0"),
        ("pepita", {"mirror_rate": float("nan")}, ValueError, "PEPITA: mirror_rate must be positive and finite"),
        ("pepita", {"mirror_rate": True}, TypeError, "PEPITA: mirror_rate must be a number, not True"),
        ("pepita", {"noise": 1}, TypeError, "its options are: seed, mirror_every, mirror_rate"),
        ("orthogonal_backprop", {"orthogonalize_every": 0}, ValueError, "orthogonalize_every must be at least 1"),
        ("orthogonal_backprop", {"streaming": True}, TypeError, "its options are: orthogonalize_every, orthogonalize_"),
    ],
)
def test_wrong_options_are_refused_at_once(engine, options, error, message):
    with pytest.raises(error, match=message):
        gradfree.create_engine(engine, **options)


# Backpropagation with orthogonal weights.


@pytest.mark.parametrize("kind", NETS)
def test_orthogonal_backprop_has_the_exact_gradients(kind):
    make, shape = NETS[kind]
    net, x = make(), torch.randn(shape)
    expected, _ = run(net, x)
    assert_equal_gradients(run(net, x, OrthogonalBackprop())[0], expected)


def test_orthogonal_backprop_takes_losses_on_states_inside_the_chain():
    net, x, seen = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(3, 8), {}
    net[1].register_forward_hook(lambda layer, args, out: seen.update(tap=out))
    expected = gradients(net, lambda: torch.cat([net(x), seen["tap"]], 1))
    with OrthogonalBackprop().attach(net):
        assert_equal_gradients(gradients(net, lambda: torch.cat([net(x), seen["tap"]], 1)), expected)


def test_orthogonal_backprop_retracts_as_foton_does():
    """Plain autograd and a projection by hand give the same weights."""
    net, x = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(5, 8)
    gradfree.orthogonalize(net)
    other = copy.deepcopy(net)

    def train(net):
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(net(x), torch.arange(5) % 4).backward()
            optimizer.step()
            yield

    with OrthogonalBackprop(orthogonalize_every=1, orthogonalize_steps=4).attach(net):
        for _ in train(net):
            assert drift(weights_of(with_weights(net).values())).max() < 1e-9
    for _ in train(other):
        project(weights_of(with_weights(other).values()))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


# All of them.


@pytest.mark.parametrize("name", ["dfa", "fa", "pepita", "foton", "orthogonal_backprop"])
def test_training_lowers_the_loss_on_digits(name):
    torch.set_default_dtype(torch.float32)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    net = dense(64, 48, 32, 10, bend=nn.Tanh)
    gradfree.orthogonalize(net)
    optimizer = gradfree.EngineOptimizer(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), net, name)
    with torch.no_grad():
        before = F.cross_entropy(net(x), y)
    for _ in range(5):
        for batch, target in zip(x.split(64), y.split(64), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(batch), target).backward()
            optimizer.step()
    with torch.no_grad():
        assert F.cross_entropy(net(x), y) < 0.7 * before
