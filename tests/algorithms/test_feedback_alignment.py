"""DFA and FA, compared with implementations by hand."""

import pytest
import torch
import torch.nn.functional as F
from layered_nets import NETS, dense, drawn, run, with_weights
from torch import nn

from gradfree import ChainError
from gradfree.algorithms import DFA, FA
from gradfree.testing.cases.models import assert_equal_gradients, gradients


def dfa_by_hand(net, x, matrices):
    """Cut the net after every activation, pool and flattening, and run autograd on each piece from B e."""
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
def test_dfa_applies_the_vjp_of_each_layers_activation_to_its_error(kind):
    make, shape = NETS[kind]
    net, x = make(), torch.randn(shape)
    actual, matrices = run(net, x, DFA())
    assert len(matrices) == len(with_weights(net)) - 1
    net.zero_grad()
    assert_equal_gradients(actual, dfa_by_hand(net, x, matrices))


def test_dfa_gives_modules_before_the_chain_an_error_through_a_leading_activation():
    net, x = nn.Sequential(nn.Linear(7, 8), nn.Sequential(nn.Tanh(), *dense(8, 6, 3))), torch.randn(4, 7)
    with DFA().attach(net, ["1"]) as handle:
        found = gradients(net, lambda: net(x))
        matrices = drawn(handle, "1")
    h = net[0](x)
    delta = 2 * net(x) @ matrices["1.1 (3, 8)"] * (1 - h.tanh() ** 2)
    torch.testing.assert_close(found["0.weight"], delta.T @ x)


def test_fa_equals_lillicraps_formulas():
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


class Residual(nn.Module):
    """A linear block: its Jacobian is the same everywhere."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(x)


class Mixing(Residual):
    """The same map for each pixel, as a convolution with a 1 x 1 kernel."""

    def __init__(self, width):
        super().__init__(width)
        self.inner = nn.Conv2d(width, width, 1)


class Tapped(nn.Sequential):
    """Also returns a state inside the chain, for a loss on it."""

    tapped = False

    def forward(self, x):
        states = [x]
        for block in self:
            states.append(block(states[-1]))
        return states[-1].sin().sum() + self.tapped * states[2].cos().sum()


@pytest.mark.parametrize(("block", "shape"), [(Residual, (3, 6)), (Residual, (3, 5, 6)), (Mixing, (2, 6, 3, 4))])
def test_dfa_in_depth_with_the_products_of_jacobians_is_backpropagation(block, shape):
    net, x = Tapped(*(block(6) for _ in range(4))), torch.randn(shape).requires_grad_()

    def found(tapped=False):
        net.tapped, x.grad = tapped, None
        return {**gradients(net, lambda: net(x)), "x": x.grad}

    exact, both = found(), found(tapped=True)
    jacobians = [torch.eye(6) + link.inner.weight.detach().reshape(6, 6) for link in net]
    products = [torch.linalg.multi_dot([*jacobians[:i:-1], torch.eye(6)]) for i in range(3)]
    with DFA().attach(net, [""]) as handle:
        random = found()
        handle.load_state_dict({"": {f"feedback: {i} (6, 6)": product for i, product in enumerate(products)}})
        assert_equal_gradients(found(), exact)
        # The direct cotangent of a state is exact and, by the rule, reaches only the block before it.
        actual = found(tapped=True)
        assert_equal_gradients(
            {n: actual[n] for n in actual if n[0] in "123"}, {n: both[n] for n in both if n[0] in "123"}
        )
    assert not torch.allclose(random["0.inner.weight"], exact["0.inner.weight"])
    torch.testing.assert_close(random["3.inner.weight"], exact["3.inner.weight"])


def test_dfa_in_depth_refuses_states_of_several_shapes():
    class Narrow(nn.Module):
        def forward(self, x):
            return F.relu(x[..., :-1])

    net = nn.Sequential(Residual(6), Narrow(), Residual(5), Narrow())
    with (
        DFA().attach(net, [""]),
        pytest.raises(ChainError, match=r"'2' returns \(3, 5\), the last block of '' \(3, 4\)"),
    ):
        net(torch.randn(3, 6)).sum().backward()
