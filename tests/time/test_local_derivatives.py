"""What chains in time offer to engines that run forward: JVPs, gradients of single sequences, other passes."""

import pytest
import torch
from cell_tasks import CELLS, HIDDEN, INPUT
from torch import nn
from torch.func import functional_call

import gradfree
from gradfree.time.cell_layer import apply_cell

LAYERS = {
    "gru": lambda: nn.GRU(INPUT, HIDDEN),
    "lstm": lambda: nn.LSTM(INPUT, HIDDEN),
    "rnn": lambda: nn.RNN(INPUT, HIDDEN),
    "relu, no biases": lambda: nn.RNN(INPUT, HIDDEN, nonlinearity="relu", bias=False),
    "lstm, no biases": lambda: nn.LSTM(INPUT, HIDDEN, bias=False),
}
OWN = [name for name in CELLS if name not in ("writing to its cotangent",)]
LENGTH, BATCH = 5, 3


class Keeping(gradfree.Engine):
    """Exact gradients; calls a function with each chain before."""

    def gradients(self, chain, direct):
        self.look(chain, direct)
        return chain.backpropagate(direct)


def in_a_pass(name, look):
    """Run ``look(chain, direct, layer, x, state)`` in the backward pass of a layer."""
    torch.manual_seed(0)
    if name in LAYERS:
        layer, parts = LAYERS[name](), 2 if "lstm" in name else 1
        state = [torch.randn(1, BATCH, HIDDEN) for _ in range(parts)]
    else:
        make, widths = CELLS[name]
        layer, state = gradfree.CellLayer(make()), [torch.randn(BATCH, width) for width in widths]
    state = tuple(state) if len(state) > 1 else state[0]
    x = torch.randn(LENGTH, BATCH, INPUT)
    engine, calls = Keeping(), []
    object.__setattr__(engine, "look", lambda *args: calls.append(look(*args, layer, x, state)))
    with engine.attach(layer):
        out, finals = layer(x, state)
        finals = finals if isinstance(finals, tuple) else (finals,)
        (out.sin().sum() + sum(f.cos().sum() for f in finals)).backward()
    assert len(calls) == 1


def as_cell(layer):
    """Return a cell with the weights of a layer of torch's, and its state's parts, as a function of its parameters."""
    if isinstance(layer, gradfree.CellLayer):
        return layer.cell
    options = {"nonlinearity": layer.nonlinearity} if isinstance(layer, nn.RNN) else {}
    cell = {nn.RNN: nn.RNNCell, nn.GRU: nn.GRUCell, nn.LSTM: nn.LSTMCell}[type(layer)](
        INPUT, HIDDEN, bias=layer.bias, **options
    )
    cell.load_state_dict({name.removesuffix("_l0"): p for name, p in layer.state_dict().items()})
    return cell


@pytest.mark.parametrize("name", [*LAYERS, *OWN])
def test_jvps_equal_products_with_dense_jacobians(name):
    def look(chain, direct, *_):
        like = chain.vectors(direct)
        v = torch.randn(2, *like.shape)
        w = torch.zeros_like(v)
        for t, jacobian in enumerate(chain.jacobians()):
            w[:, t + 1] = torch.einsum("bij,nbj->nbi", jacobian, w[:, t] + v[:, t])
        torch.testing.assert_close(chain.jvps(v), w, rtol=1e-10, atol=1e-10)

    in_a_pass(name, look)


@pytest.mark.parametrize("name", [*LAYERS, *OWN])
@pytest.mark.parametrize("steps", [slice(None), slice(1, 3)], ids=str)
def test_gradients_of_each_sequence_equal_those_of_autograd(name, steps):
    def look(chain, direct, layer, x, state):
        like = chain.vectors(direct)[steps]
        cotangents = torch.randn(2, *like.shape)
        delta = chain.cotangents(cotangents.transpose(0, 1).flatten(1, 2), direct)
        found = chain.sample_gradients(delta, steps, sets=2)
        cell, states = as_cell(layer), chain.run()
        first = state if isinstance(state, tuple) else (state,)
        first = [part.reshape(BATCH, -1) for part in first]
        if len(first) < len(states):
            first = [torch.zeros_like(states[0][0]), *first]
        before = [torch.cat([f[None], s[:-1]])[steps] for f, s in zip(first, states, strict=True)]
        own = dict(cell.named_parameters())

        class Once(nn.Module):
            def __init__(self):
                super().__init__()
                self.cell = cell

            def forward(self, x, parts):
                return torch.cat(apply_cell(self.cell, x, parts), -1)

        for b in range(BATCH):
            for n in range(2):
                with torch.enable_grad():
                    after = Once()(x[steps][:, b], [part[:, b] for part in before])
                    exact = torch.autograd.grad(after, list(own.values()), cotangents[n, :, b])
                for g, e in zip(found, exact, strict=True):
                    torch.testing.assert_close(g[b, n], e, rtol=1e-10, atol=1e-10)

    in_a_pass(name, look)


@pytest.mark.parametrize("name", [*LAYERS, *OWN])
def test_another_pass_has_the_states_of_the_layer(name):
    def look(chain, direct, layer, x, state):
        again = chain.run()
        changed = [1.1 * p.detach() for p in chain.parameters]
        other = chain.run(parameters=changed)
        kind = gradfree.CellLayer if isinstance(layer, gradfree.CellLayer) else type(layer)
        for states, factor in ((again, 1.0), (other, 1.1)):
            given = {key: factor * p.detach() for key, p in layer.named_parameters()}

            class Alone(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layer = layer

                def forward(self):
                    return kind.forward(self.layer, x, state)

            with torch.no_grad():
                out, finals = functional_call(Alone(), {f"layer.{key}": p for key, p in given.items()}, ())
            torch.testing.assert_close(states[0], out)
            finals = finals if isinstance(finals, tuple) else (finals,)
            for part, final in zip(states[-len(finals) :], finals, strict=True):
                torch.testing.assert_close(part[-1], final.reshape(part[-1].shape))
        halved = chain.run(initial=[0.5 * part for part in chain_start(chain)])
        assert not torch.equal(halved[0], again[0])

    in_a_pass(name, look)


def chain_start(chain):
    return chain.first if hasattr(chain, "first") else [part[0].detach() for part in chain.before]


def test_the_diagonal_of_any_cell_is_that_of_its_jacobians():
    def look(chain, direct, *_):
        (block,), *_ = chain.unit_blocks(carried=False)
        torch.testing.assert_close(block[1:], chain.jacobians().diagonal(0, -2, -1), rtol=1e-10, atol=1e-10)

    for name in ("leaky", "gru", "rnn", "relu, no biases"):
        in_a_pass(name, look)


def test_gradients_of_each_sequence_add_up_to_the_gradients():
    def look(chain, direct, *_):
        delta = chain.repeated_links(1).unroll(direct)
        found = chain.sample_gradients(delta)
        exact = chain.gradients(delta).parameters
        for g, e in zip(found, exact, strict=True):
            torch.testing.assert_close(g.sum((0, 1)), e, rtol=1e-10, atol=1e-10)

    for name in (*LAYERS, "two parts"):
        in_a_pass(name, look)
