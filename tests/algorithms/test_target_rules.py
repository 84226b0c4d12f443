"""Rules that learn from targets or from the loss itself, against oracles written from the papers."""

import copy
import zlib

import pytest
import torch
from layered_nets import convolutions, dense, drawn
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import gradfree
from gradfree import ChainError
from gradfree.algorithms import DRTP, FA, MeZO, TargetPropagation
from gradfree.testing.cases.models import assert_equal_gradients


def gradients_of(net, x, y, engine):
    """Return the gradients with a lesson, the engine's tensors, and what it keeps."""
    net.zero_grad()

    def loss():
        return cross_entropy(net(x), y)

    with engine.attach(net, [""]) as handle, handle.lesson(targets=y, loss=loss):
        loss().backward()
        return {name: p.grad.clone() for name, p in net.named_parameters()}, drawn(handle), handle.state_dict()[""]


@pytest.mark.parametrize("real", [False, True])
def test_drtp_is_the_published_rule_times_the_norm_of_each_error(real):
    net, x, y = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(7, 8), torch.randint(3, (7,))
    targets = torch.randn(7, 3) if real else one_hot(y, 3).to(x.dtype)
    with DRTP(seed=4).attach(net, [""]) as handle, handle.lesson(targets=targets if real else y):
        cross_entropy(net(x), y).backward()
        matrices = drawn(handle)
    logits = net(x)
    e = (logits.softmax(1) - one_hot(y, 3)) / 7
    h1, h2 = (net[:n](x) for n in (2, 4))
    signal = -targets * e.norm(dim=1, keepdim=True)
    d1 = (signal @ matrices["2 (3, 6)"]) * (1 - h1**2)
    d2 = (signal @ matrices["4 (3, 5)"]) * (1 - h2**2)
    expected = {}
    for name, delta, given in (("0", d1, x), ("2", d2, h1), ("4", e, h2)):
        expected |= {f"{name}.weight": delta.t() @ given, f"{name}.bias": delta.sum(0)}
    assert_equal_gradients({name: p.grad for name, p in net.named_parameters()}, expected)


@pytest.mark.parametrize(
    "y", [torch.tensor([0, 1, 1, 0]), torch.tensor([3, 0, 2, 5]), torch.tensor([0.5, 2.0, -1.0, 0.0])]
)
def test_targets_of_one_output_are_numbers(y):
    """Not indices of the only class."""
    net, x = dense(8, 6, 1, bend=nn.Tanh), torch.randn(4, 8)

    def gradients(targets):
        net.zero_grad()
        with DRTP(seed=4).attach(net, [""]) as handle, handle.lesson(targets=targets):
            net(x).squeeze(1).sub(y).square().sum().backward()
        return {name: p.grad.clone() for name, p in net.named_parameters()}

    assert_equal_gradients(gradients(y), gradients(y.unsqueeze(1).double()))


def test_drtp_refuses_outputs_with_more_dimensions():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 3, 3))
    targets = torch.zeros(7, dtype=torch.long)
    with (
        DRTP().attach(net) as handle,
        handle.lesson(targets),
        pytest.raises(ChainError, match=r"outputs \(samples, classes\)"),
    ):
        net(torch.randn(7, 1, 6, 6)).sum().backward()


@pytest.mark.parametrize("targets", [torch.zeros(6, dtype=torch.long), torch.zeros(7), torch.zeros(7, 2)], ids=str)
def test_drtp_refuses_targets_that_do_not_fit(targets):
    net = dense(8, 6, 3, bend=nn.Tanh)
    with DRTP().attach(net) as handle, handle.lesson(targets), pytest.raises(ChainError, match=r"lesson has targets"):
        net(torch.randn(7, 8)).sum().backward()


def test_target_propagation_is_the_published_algorithm():
    """Lee et al. 2015, algorithm 1, with a target for the last hidden state from its exact, normalised error."""
    engine = TargetPropagation(step=0.2, sigma=0.3, rate=0.4, seed=1)
    net, x, y = dense(8, 6, 5, 4, 3, bend=nn.Tanh), torch.randn(7, 8), torch.randint(3, (7,))
    found, after, _ = gradients_of(net, x, y, engine)
    h = [x, *(net[: 2 * n](x).detach() for n in (1, 2, 3))]
    weight = net[6].weight.detach()
    e_out = ((net(x).softmax(1) - one_hot(y, 3)) / 7).detach()
    e = e_out @ weight
    norms = e.norm(dim=1, keepdim=True)
    target = h[3] - 0.2 * e / norms
    expected = {"6.weight": e_out.t() @ h[3], "6.bias": e_out.sum(0)}
    inverses = {2: after["2 (6, 6)"], 3: after["4 (5, 5)"]}

    def g(layer, out):
        return torch.tanh(out @ inverses[layer][:, :-1].t() + inverses[layer][:, -1])

    for layer in (3, 2, 1):
        delta = (h[layer] - target) / 0.2 * norms * (1 - h[layer] ** 2)
        name = str(2 * (layer - 1))
        expected |= {f"{name}.weight": delta.t() @ h[layer - 1], f"{name}.bias": delta.sum(0)}
        if layer > 1:
            target = h[layer - 1] + g(layer, target) - g(layer, h[layer])
    assert_equal_gradients(found, expected)


def test_an_inverse_learns_by_the_gradient_of_its_reconstruction():
    """Lee et al. 2015, eq. 14: ‖g(f(h + ε)) - (h + ε)‖², here with hardly any noise, by normalised steps."""
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(7, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    kept = []
    with TargetPropagation(sigma=1e-13, rate=0.4).attach(net, [""]) as handle:
        for _ in range(2):
            net(x).sum().backward()
            optimizer.step()
            kept.append(drawn(handle)["2 (6, 6)"].clone().requires_grad_())
    before, after = kept
    h, out = net[:2](x).detach(), net[:4](x).detach()
    back = torch.tanh(out @ before[:, :-1].t() + before[:, -1])
    (slope,) = torch.autograd.grad((back - h).pow(2).sum(1).mean() / 2, before)
    expected = before - 0.4 * slope / (1 + out.pow(2).sum(1).mean())
    torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-9)


def test_the_inverses_of_target_propagation_learn_to_reconstruct():
    """After many steps with weights that do not change, they undo the layers, and targets point as errors do."""
    net, x, y = dense(6, 6, 6, 6, 3, bend=nn.Tanh), torch.randn(64, 6), torch.randint(3, (64,))
    net.requires_grad_(True)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    exact = torch.autograd.grad(cross_entropy(net(x), y), [net[2].weight])[0].flatten()

    def miss(matrices):
        h = net[:4](x)
        matrix = matrices["4 (6, 7)"]
        back = torch.tanh(net[:6](x) @ matrix[:, :-1].t() + matrix[:, -1])
        return ((back - h).norm() / h.norm()).item()

    misses = []
    with TargetPropagation(sigma=0.05, rate=1.0).attach(net, [""]) as handle:
        for _ in range(300):
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
            misses.append(miss(drawn(handle)))
        alike = torch.cosine_similarity(net[2].weight.grad.flatten(), exact, dim=0)
    assert misses[-1] < 0.3 * misses[0]
    assert alike > 0


@pytest.mark.parametrize("samples", [5, 0])
def test_inverses_learn_nothing_from_a_batch_with_nan_or_without_samples(samples):
    net = dense(6, 6, 6, 3, bend=nn.Tanh)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    with TargetPropagation().attach(net, [""]) as handle:
        net(torch.randn(5, 6)).square().sum().backward()
        before = drawn(handle)["2 (6, 7)"]
        optimizer.step()
        net(torch.full((samples, 6), torch.nan)).square().sum().backward()
        assert torch.equal(before, drawn(handle)["2 (6, 7)"])


@pytest.mark.parametrize("pool", [nn.AvgPool2d, nn.MaxPool2d])
def test_target_propagation_keeps_the_random_state_with_dropout_and_convolutions(pool):
    net, x = nn.Sequential(nn.Linear(8, 8), convolutions(pool)), torch.randn(4, 2, 8, 8)
    with TargetPropagation().attach(net, ["1"]) as handle:
        out = net(x)
        state = torch.get_rng_state()
        out.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        # Behind the stem the input of the chain has an inverse, too.
        assert {key.partition(" ")[0] for key in drawn(handle, "1") if "(" in key} == {"1.0", "1.3", "1.8"}
    assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.slow
def test_mezo_is_unbiased():
    """Over 4,000 directions the bias is below three standard errors."""
    net, x, y = dense(4, 5, 3, bend=nn.Tanh), torch.randn(7, 4), torch.randint(3, (7,))
    exact = torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters()))
    means = []
    for seed in range(8):
        found, *_ = gradients_of(net, x, y, MeZO(samples=500, seed=seed, epsilon=1e-4))
        means.append(torch.cat([g.flatten() for g in found.values()]))
    samples, truth = torch.stack(means), torch.cat([g.flatten() for g in exact])
    error = (samples.mean(0) - truth) / (samples.std(0) / 8**0.5)
    assert error.pow(2).mean().sqrt() < 3
    assert (samples.mean(0) - truth).norm() < 0.2 * truth.norm()


def test_mezo_trains_both_parts_of_complex_weights():
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(torch.complex128), torch.randn(4, 3) + 0j

    def loss():
        return net(x).abs().square().sum()

    exact = torch.cat([g.flatten() for g in torch.autograd.grad(loss(), list(net.parameters()))])
    with MeZO(samples=2000, epsilon=1e-4).attach(net, [""]) as handle, handle.lesson(loss=loss):
        loss().backward()
    found = torch.cat([p.grad.flatten() for p in net.parameters()])
    assert (found - exact).norm() < 0.2 * exact.norm()


def test_mezo_estimates_the_slope_of_the_loss_itself_and_leaves_the_weights():
    net, x, y = dense(4, 5, 3, bend=nn.Tanh), torch.randn(7, 4), torch.randint(3, (7,))
    before = copy.deepcopy(net.state_dict())
    versions = [p._version for p in net.parameters()]
    found, *_ = gradients_of(net, x, y, MeZO(epsilon=0.1))
    assert all(torch.equal(before[name], p) for name, p in net.state_dict().items())
    assert versions == [p._version for p in net.parameters()]
    z = [g / found["0.bias"][0] for g in found.values()]  # z up to a factor, as all are slope · z.
    moved = copy.deepcopy(net)

    def at(length):
        with torch.no_grad():
            for p, own, d in zip(moved.parameters(), net.parameters(), z, strict=True):
                p.copy_(own + length * d)
            return cross_entropy(moved(x), y)

    # The engine's direction is c · z, and its estimate slope(c · z) · c · z. The seed is that of the first pass.
    generator = torch.Generator().manual_seed(zlib.crc32(b"0  0 1"))
    first = [torch.randn(p.shape, generator=generator) for p in net.parameters()]
    slope = (at(0.1 * first[1][0]) - at(-0.1 * first[1][0])) / 0.2
    for g, d in zip(found.values(), first, strict=True):
        torch.testing.assert_close(g, slope * d, rtol=1e-8, atol=1e-8)


class Centred(nn.Module):
    """Subtracts a running mean, which it replaces or changes in place."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        new = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.in_place:
            self.mean.copy_(new)
        else:
            self.mean = new
        return x - self.mean


@pytest.mark.parametrize("in_place", [True, False])
def test_mezo_evaluates_the_loss_with_the_buffers_of_the_pass(in_place):
    net, x = nn.Sequential(Centred(in_place), dense(4, 5, 3, bend=nn.Tanh)), torch.randn(7, 4) + 3
    losses = []

    def loss():
        out = net(x).square().sum()
        losses.append(net[0].mean.clone())
        if len(losses) == 4:
            raise RuntimeError("out of luck")
        return out

    with MeZO(epsilon=1e-3).attach(net, ["1"]) as handle, handle.lesson(loss=loss):
        loss().backward()
        after = net[0].mean
        torch.testing.assert_close(after, 0.1 * x.mean(0))
        assert torch.equal(losses[1], losses[2])
        with pytest.raises(RuntimeError, match="out of luck"):
            net(x).square().sum().backward()
    torch.testing.assert_close(net[0].mean, 0.19 * x.mean(0))


def test_mezo_trains_every_kind_of_chain_and_gives_the_rest_exact_gradients():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.rnn, self.head = nn.Linear(3, 4), nn.GRU(4, 5, 2), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.rnn(self.stem(x))[0])

    net, x = Net(), torch.randn(6, 4, 3)

    def loss():
        return net(x).pow(2).mean()

    loss().backward()
    exact = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    with MeZO(samples=200, epsilon=1e-4).attach(net) as handle, handle.lesson(loss=loss):
        loss().backward()
    found = {name: p.grad for name, p in net.named_parameters()}
    outside = [name for name in exact if not name.startswith("rnn")]
    assert_equal_gradients({n: found[n] for n in outside}, {n: exact[n] for n in outside})
    one, two = (torch.cat([g[n].flatten() for n in exact if n not in outside]) for g in (found, exact))
    assert torch.cosine_similarity(one, two, dim=0) > 0.5


def test_mezo_refuses_computed_weights():
    net = dense(4, 5, 3)
    nn.utils.parametrizations.weight_norm(net[0])
    with pytest.raises(ChainError, match=r"0 has a parametrization"):
        MeZO().attach(nn.Sequential(net, net[1]), [""])


def test_a_weight_mirror_follows_its_rule():
    """Akrout et al. 2019: B decays and gets the mean of y xᵀ over noise x that the layer maps to y."""
    net, x = dense(8, 6, 3, bend=nn.Tanh), torch.randn(5, 8)
    engine = FA(feedback="mirror", decay=0.1, seed=2)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    with engine.attach(net) as handle:
        net(x).sum().backward()
        before = handle.chains[""].feedback_weights()["2"]
        optimizer.step()
        after = handle.chains[""].feedback_weights()["2"]
        noise = torch.randn(6, 64, generator=engine.generator("2, step 1"))
        mean = torch.stack([torch.outer(net[2].weight @ sample, sample) for sample in noise.t()]).mean(0)
        torch.testing.assert_close(after, 0.9 * before + 0.1 * mean)
        for _ in range(150):
            optimizer.step()
        mirrored = handle.chains[""].feedback_weights()["2"]
    alike = torch.cosine_similarity(mirrored.flatten(), net[2].weight.flatten(), dim=0)
    assert alike > 0.95
    assert abs(mirrored.norm() / net[2].weight.norm() - 1) < 0.15


def test_a_mirror_is_kept_in_checkpoints_and_is_for_convolutions_too():
    net, x = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3)), torch.randn(3, 2, 6, 6)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    with gradfree.create_engine("fa", feedback="mirror", decay=0.2).attach(net) as handle:
        net(x).sum().backward()
        for _ in range(200):
            optimizer.step()
        b = handle.chains[""].feedback_weights()["2"]
        kept = copy.deepcopy(handle.state_dict())
    assert torch.cosine_similarity(b.flatten(), net[2].weight.flatten(), dim=0) > 0.9
    with gradfree.create_engine("fa", feedback="mirror", decay=0.2).attach(net) as handle:
        handle.load_state_dict(kept)
        assert torch.equal(handle.chains[""].feedback_weights()["2"], b)
