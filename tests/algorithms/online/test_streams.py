"""Online rules over streams: exactness, what is carried, and what is refused."""

import copy

import pytest
import torch
from cell_tasks import CELLS, HIDDEN, INPUT
from torch import nn

import gradfree
from gradfree.algorithms import RTRL, UORO, EProp, HighwayBP, SnAp, Truncated
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.testing.cases.models import assert_equal_gradients

LAYERS = {
    "gru": lambda: nn.GRU(INPUT, HIDDEN),
    "lstm": lambda: nn.LSTM(INPUT, HIDDEN),
    "rnn": lambda: nn.RNN(INPUT, HIDDEN),
    "no biases": lambda: nn.GRU(INPUT, HIDDEN, bias=False),
    **{name: lambda make=make: gradfree.CellLayer(make()) for name, (make, _) in CELLS.items()},
}
OWN_STATE = {"two parts": (HIDDEN, 2), "projecting": (HIDDEN, HIDDEN), "para_lstm": (HIDDEN, HIDDEN)}
CHUNKS = ((0, 5), (5, 6), (6, 12))


def detached(state):
    return tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()


def case(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    state = tuple(torch.zeros(3, width) for width in OWN_STATE[name]) if name in OWN_STATE else None
    x = torch.randn(12, 3, INPUT)
    out, _ = layer(x, state)
    return layer, state, x, torch.randn_like(out)


def gradients(layer, engine, state, x, w, chunks=CHUNKS, between=lambda n, state: state):
    """Return the sums of the gradients of all chunks."""
    layer.zero_grad()
    with engine.attach(layer):
        for n, (begin, end) in enumerate(chunks):
            out, state = layer(x[begin:end], state)
            (out * w[begin:end]).sum().backward()
            state = between(n, detached(state))
    return {name: p.grad.clone() for name, p in layer.named_parameters()}


def exact(layer, state, x, w):
    layer.zero_grad()
    (layer(x, state)[0] * w).sum().backward()
    return {name: p.grad.clone() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "writing to its cotangent"])
def test_rtrl_over_chunks_equals_backpropagation_through_the_whole_sequence(name):
    layer, state, x, w = case(name)
    expected = exact(layer, state, x, w)
    assert_equal_gradients(gradients(layer, RTRL(stream=True), state, x, w), expected)
    assert_equal_gradients(gradients(layer, RTRL(), state, x, w, [(0, 12)]), expected)
    with pytest.raises(AssertionError, match="is off by"):
        assert_equal_gradients(gradients(layer, RTRL(), state, x, w), expected)


class RoundsByBatch(nn.RNNCell):
    """Rounds differently in larger batches, as some kernels of matrix products do."""

    def forward(self, x, h):
        return super().forward(x, h) * (1 + 1e-15 * len(x))


def test_a_stream_goes_on_though_steps_round_differently_in_a_batch():
    torch.manual_seed(0)
    layer, x, w = (
        gradfree.CellLayer(RoundsByBatch(INPUT, HIDDEN)),
        torch.randn(12, 3, INPUT),
        torch.randn(12, 3, HIDDEN),
    )
    assert_equal_gradients(gradients(layer, RTRL(stream=True), None, x, w), exact(layer, None, x, w))


def test_rtrl_of_single_steps_is_the_recursion_of_the_paper():
    """P_t = F_t P_{t-1} + ∂f_t/∂θ, and the gradient is Σ e_t P_t."""
    layer, _, x, w = case("rnn")
    names = [name for name, _ in layer.named_parameters()]
    h, influence, total = torch.zeros(3, HIDDEN), None, 0.0

    def step(weights, h, x):
        w_ih, w_hh, b_ih, b_hh = weights
        return torch.tanh(w_ih @ x + b_ih + w_hh @ h + b_hh)

    weights = [p.detach() for p in layer.parameters()]
    for t in range(12):
        per_sample = torch.func.vmap(torch.func.jacrev(step, argnums=(0, 1)), in_dims=(None, 0, 0))
        of_weights, jacobian = per_sample(weights, h, x[t])
        flat = torch.cat([g.flatten(2) for g in of_weights], -1)
        influence = flat if influence is None else jacobian @ influence + flat
        total = total + torch.einsum("bh,bhp->p", w[t], influence)
        h = torch.stack([step(weights, h[b], x[t, b]) for b in range(3)])
    parts = total.split([p.numel() for p in weights])
    expected = {name: part.view_as(p) for name, part, p in zip(names, parts, weights, strict=True)}
    assert_equal_gradients(gradients(layer, RTRL(stream=True), None, x, w, [(t, t + 1) for t in range(12)]), expected)


class Masked(gradfree.Engine):
    """The oracle of ``snap``: δ by dense Jacobians of which only the blocks of single units are kept."""

    def gradients(self, chain, direct):
        delta, jacobians = chain.vectors(direct), chain.jacobians()
        parts = len(chain.states)
        keep = torch.eye(delta.shape[-1] // parts).repeat(parts, parts)
        for t in range(len(chain) - 1, 0, -1):
            delta[t - 1] += torch.einsum("bi,bij->bj", delta[t], keep * jacobians[t - 1])
        return chain.gradients(chain.cotangents(delta, direct))


@pytest.mark.parametrize("name", ["gru", "lstm", "rnn", "leaky", "gru cell", "para_gru", "para_lstm"])
def test_snap_is_the_recurrence_along_the_diagonal_of_the_jacobians(name):
    layer, state, x, w = case(name)
    whole = [(0, 12)]
    expected = gradients(layer, Masked(), state, x, w, whole)
    assert_equal_gradients(gradients(layer, SnAp(), state, x, w, whole), expected)
    with pytest.raises(AssertionError, match="is off by"):
        assert_equal_gradients(gradients(layer, Truncated(window=1), state, x, w, whole), expected)


@pytest.mark.parametrize(
    ("engine", "name"),
    [(SnAp, "rnn"), *((engine, n) for engine in (SnAp, EProp) for n in ("gru", "lstm", "no biases"))],
)
def test_chunks_of_a_stream_add_up_to_the_whole_sequence(engine, name):
    layer, state, x, w = case(name)
    expected = gradients(layer, engine(), state, x, w, [(0, 12)])
    assert_equal_gradients(gradients(layer, engine(stream=True), state, x, w), expected)


def test_symmetric_eprop_is_highway_bp_without_iterations():
    layer, state, x, w = case("gru")
    eprop, highway = (gradients(layer, e, state, x, w, [(0, 12)]) for e in (EProp(), HighwayBP(iterations=0)))
    assert_equal_gradients(eprop, highway, tolerance=0.0)


def test_eprop_of_an_lstm_is_the_published_sum_of_traces():
    """Bellec et al. 2020, eqs. 1, 13 and 14: ε_t = f_t ε_{t-1} + ∂c_t/∂θ, e_t = o_t tanh'(c_t) ε_t + ∂h_t/∂θ."""
    layer, _, x, w = case("lstm")
    names, weights = zip(*layer.named_parameters(), strict=True)
    h = c = torch.zeros(3, HIDDEN)
    total = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    trace = [torch.zeros(3, HIDDEN, *p.shape) for p in weights]
    for t in range(12):
        i, f, g, o = (x[t] @ weights[0].T + weights[2] + h @ weights[1].T + weights[3]).chunk(4, -1)
        new = f.sigmoid() * c + i.sigmoid() * g.tanh()
        carried = new.detach().requires_grad_()
        out = o.sigmoid() * carried.tanh()
        for b in range(3):
            for unit in range(HIDDEN):
                of_c = torch.autograd.grad(new[b, unit], weights, retain_graph=True)
                of_h = torch.autograd.grad(out[b, unit], [*weights, carried], retain_graph=True, allow_unused=True)
                slope = of_h[-1][b, unit]
                for n, name in enumerate(names):
                    trace[n][b, unit] = f.sigmoid()[b, unit].detach() * trace[n][b, unit] + of_c[n]
                    total[name] += w[t, b, unit] * (of_h[n] + slope * trace[n][b, unit])
        h, c = out.detach(), new.detach()
    assert_equal_gradients(gradients(layer, EProp(), None, x, w, [(0, 12)]), total)


@pytest.mark.parametrize("feedback", ["random", "adaptive"])
def test_eprop_with_other_feedback_gets_its_signal_through_other_readout_weights(feedback):
    rule = {"random": "random", "adaptive": "learned"}[feedback]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.readout = nn.GRU(INPUT, HIDDEN), nn.Linear(HIDDEN, 2)

        def forward(self, x):
            return self.readout(self.rnn(x)[0])

    def trained(attach):
        torch.manual_seed(0)
        net, x = Net(), torch.randn(7, 3, INPUT)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        handles = attach(net)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).pow(2).sum().backward()
            optimizer.step()
        for handle in handles:
            handle.detach()
        assert "forward" not in vars(net.readout)
        return net.state_dict()

    one = trained(lambda net: [EProp(feedback=feedback, seed=3).attach(net)])
    fa = gradfree.create_engine("fa", feedback=rule, seed=3)
    two = trained(lambda net: [EProp().attach(net), fa.attach(net, ["readout"])])
    symmetric = trained(lambda net: [EProp().attach(net)])
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["rnn.weight_hh_l0"], symmetric["rnn.weight_hh_l0"])


def test_eprop_with_random_feedback_refuses_a_model_without_a_readout():
    model = nn.Sequential(nn.GRU(3, 3))
    for batch in (None, torch.randn(5, 2, 3)):
        (problem,) = EProp(feedback="random").validate(model, batch=batch).problems
        assert problem.startswith("feedback='random' is for a readout, but the model has no linear layer outside of")
    with pytest.raises(gradfree.ChainError, match="no linear layer"):
        EProp(feedback="random").attach(model)
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("name", ["gru", "lstm", "leaky"])
@pytest.mark.parametrize("chunks", [[(0, 4)], [(0, 2), (2, 3), (3, 4)]], ids=len)
def test_uoro_is_unbiased(name, chunks):
    """Over 4,000 draws, which are sequences of one batch, the bias is below three standard errors, on average."""
    layer, state, x, w = case(name)
    expected = exact(layer, state, x[:4, :1], w[:4, :1])
    draws = 4000
    many_x, many_w = x[:4, :1].repeat(1, draws, 1), w[:4, :1].repeat(1, draws, 1)
    sums, squares = {}, {}
    for sample in range(5):
        found = gradients(layer, UORO(seed=sample, stream=True), state, many_x, many_w, chunks)
        for key, g in found.items():
            sums[key] = sums.get(key, 0) + g / draws / 5
            squares[key] = squares.get(key, 0) + (g / draws) ** 2 / 5
    errors = []
    for key, mean in sums.items():
        spread = ((squares[key] - mean**2) * 5 / 4).sqrt() / 5**0.5
        errors.append(((mean - expected[key]) / spread.mean()).flatten())
    assert torch.cat(errors).pow(2).mean().sqrt() < 3.0
    total = torch.cat([(sums[key] - e).flatten() for key, e in expected.items()])
    assert total.norm() < 0.15 * torch.cat([e.flatten() for e in expected.values()]).norm()


def test_uoro_draws_new_signs_in_each_pass_and_the_same_after_a_checkpoint():
    layer, state, x, w = case("gru")

    def run(handle):
        layer.zero_grad()
        (layer(x, state)[0] * w).sum().backward()
        return layer.weight_hh_l0.grad.clone(), copy.deepcopy(handle.state_dict())

    with UORO().attach(layer) as handle:
        first, kept = run(handle)
        second, _ = run(handle)
    assert not torch.equal(first, second)
    with UORO().attach(layer) as handle:
        handle.load_state_dict(kept)
        assert torch.equal(run(handle)[0], second)


@pytest.mark.parametrize("engine", [RTRL(stream=True), SnAp(stream=True), EProp(stream=True)], ids=str)
def test_a_sequence_that_begins_anew_carries_nothing(engine):
    """One sequence of three gets zeros after the first chunk: it learns as two sequences, the others as one."""
    layer, state, x, w = case("gru")

    def reset(n, state):
        return state * torch.tensor([1.0, 0.0, 1.0])[:, None] if n == 0 else state

    found = gradients(layer, engine, state, x, w, between=reset)
    kept = [0, 2]
    parts = [
        gradients(layer, engine, state, x[:, kept], w[:, kept], [(0, 12)]),
        gradients(layer, engine, state, x[:5, 1:2], w[:5, 1:2], [(0, 5)]),
        gradients(layer, engine, state, x[5:, 1:2], w[5:, 1:2], [(0, 7)]),
    ]
    assert_equal_gradients(found, {name: sum(part[name] for part in parts) for name in found})


def test_a_stream_continues_from_a_checkpoint_and_after_a_batch_of_another_size():
    layer, state, x, w = case("gru")
    expected = exact(layer, state, x, w)
    layer.zero_grad()
    with RTRL(stream=True).attach(layer) as handle:
        out, state = layer(x[:5], state)
        (out * w[:5]).sum().backward()
        kept, state = copy.deepcopy(handle.state_dict()), detached(state)
    with RTRL(stream=True).attach(layer) as handle:
        handle.load_state_dict(kept)
        out, _ = layer(x[5:], state)
        (out * w[5:]).sum().backward()
        found = {name: p.grad.clone() for name, p in layer.named_parameters()}
        assert_equal_gradients(found, expected)
        layer(x[:, :2])[0].sum().backward()


def test_frozen_weights_carry_nothing_and_get_no_gradient():
    layer, state, x, w = case("gru")
    expected = exact(layer, state, x, w)
    layer.weight_ih_l0.requires_grad_(False)
    layer.weight_ih_l0.grad = None
    layer.zero_grad()
    with RTRL(stream=True).attach(layer) as handle:
        for begin, end in CHUNKS:
            out, state = layer(x[begin:end], state)
            (out * w[begin:end]).sum().backward()
            state = state.detach()
        assert "stream: l0 0" not in handle.state_dict()[""]
    assert layer.weight_ih_l0.grad is None
    torch.testing.assert_close(layer.weight_hh_l0.grad, expected["weight_hh_l0"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("engine", "draws", "off"), [(RTRL(stream=True), 1, 1e-10), (UORO(stream=True), 20_000, 0.2)])
def test_a_weight_that_is_frozen_in_one_chunk_keeps_its_part_in_the_state(engine, draws, off):
    """The loss is one of the last chunk, which reaches back to the first one."""
    layer, _, x, w = case("gru")
    w[:6] = 0.0

    def freeze(n, state):
        layer.weight_ih_l0.requires_grad_(n != 0)
        return state

    layer.zero_grad()
    out, state = [], None
    for n, (begin, end) in enumerate(CHUNKS):
        found, state = layer(x[begin:end, :1], state)
        out.append(freeze(n, found))
    (torch.cat(out) * w[:, :1]).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in layer.parameters()])
    found = gradients(layer, engine, None, *(part[:, :1].repeat(1, draws, 1) for part in (x, w)), between=freeze)
    found = torch.cat([g.flatten() for g in found.values()]) / draws
    assert (found - expected).norm() < off * expected.norm()


def test_parameters_that_are_frozen_meanwhile_do_not_keep_a_batch_of_another_size():
    layer, _, x, _ = case("gru")
    with RTRL(stream=True).attach(layer):
        for size, trained in ((2, True), (3, False), (3, True)):
            layer.weight_ih_l0.requires_grad_(trained)
            layer.zero_grad()
            layer(x[:, :size])[0].sum().backward()
    found = layer.weight_ih_l0.grad.clone()
    layer.zero_grad()
    layer(x)[0].sum().backward()
    torch.testing.assert_close(found, layer.weight_ih_l0.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", [RTRL, SnAp])
def test_what_is_kept_does_not_grow_with_the_stream(engine):
    layer, state, x, w = case("gru")
    sizes = []
    with engine(stream=True).attach(layer) as handle:
        for _ in range(3):
            out, state = layer(x, state)
            (out * w).sum().backward()
            state = state.detach()
            sizes.append({key: kept.shape for key, kept in handle.state_dict()[""].items()})
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [RTRL, SnAp])
def test_peak_memory_is_the_same_for_a_stream_of_1024_and_of_16384_steps(engine):
    """Within 1 %; a backward pass through all steps of 1,024 needs much more than chunks of 128."""
    layer, chunk = nn.GRU(INPUT, HIDDEN), 128

    def pass_over(steps, chunk):
        state = None
        with engine(stream=True).attach(layer):
            for _ in range(steps // chunk):
                out, state = layer(torch.ones(chunk, 3, INPUT), state)
                out.sum().backward()
                state = state.detach()

    pass_over(2 * chunk, chunk)
    short, long = (peak_memory(lambda steps=steps: pass_over(steps, chunk), "cpu") for steps in (1024, 16384))
    assert long == pytest.approx(short, rel=0.01)
    assert peak_memory(lambda: pass_over(1024, 1024), "cpu") > 4 * short
