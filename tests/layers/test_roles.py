"""Registered layers are treated like torch's layers of the same role."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfree
from gradfree.layers import roles
from gradfree.testing.cases.models import assert_equal_gradients, gradients

ENGINES = ("foton", "dfa", "pepita", "orthogonal_backprop")


class OwnLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.einsum("ni,oi->no", x, self.weight) + self.bias


class OwnSoftsign(nn.Module):
    def forward(self, x):
        return x / (1 + x.abs())


class OwnMaxPool(nn.Module):
    def forward(self, x):
        return F.max_pool2d(x, 2)


class Half(nn.Linear):
    """Half of an ``nn.Linear`` without bias."""

    def forward(self, x):
        return F.linear(x, self.weight) / 2


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    """Unregister the layers after each test."""
    monkeypatch.setattr(roles, "_KNOWN", dict(roles._KNOWN))


@pytest.fixture
def own():
    gradfree.register_layer(OwnLinear, "weights", linear=lambda _, x, weight: torch.einsum("ni,oi->no", x, weight))
    gradfree.register_layer(OwnSoftsign, "pointwise", isometric=True)
    gradfree.register_layer(OwnMaxPool, "max", linear=lambda _, x: F.avg_pool2d(x, 2))


def model(linear, softsign, pool):
    beginning = nn.Conv2d(1, 3, 3, padding=1), pool(), nn.Flatten()
    return nn.Sequential(*beginning, linear(12, 8), softsign(), linear(8, 6), softsign(), linear(6, 3))


def torchs():
    return model(nn.Linear, nn.Softsign, lambda: nn.MaxPool2d(2))


def owns():
    return model(OwnLinear, OwnSoftsign, OwnMaxPool)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", ENGINES)
def test_registered_layers_get_the_gradients_of_torchs_layers_of_the_same_role(name):
    """They are also kept orthogonal, or get feedback, in the same way: over two optimizer steps."""
    first, second, x = torchs(), owns(), torch.randn(5, 1, 4, 4)
    second.load_state_dict(first.state_dict())
    engine = gradfree.create_engine(name)
    for net in (first, second):
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        with engine.attach(net):
            for _ in range(2):
                gradients(net, lambda net=net: net(x))
                optimizer.step()
    assert_equal_gradients(*({n: p.grad for n, p in net.named_parameters()} for net in (second, first)))
    assert_equal_gradients(dict(second.named_parameters()), dict(first.named_parameters()))


def test_unregistered_layers_are_refused_with_the_remedy():
    problems = gradfree.create_engine("foton").validate(owns(), [""]).problems
    assert [p.split(",")[0] for p in problems if "cannot split" in p][:2] == [
        "1 is a OwnMaxPool",
        "3 is a OwnLinear",
    ]
    assert "gradfree.register_layer" in problems[0]


def test_a_subclass_counts_if_it_keeps_the_known_forward_and_may_be_registered_itself():
    class Named(nn.Linear):
        pass

    assert roles.role_of(Named(2, 2)) is roles.Role.WEIGHTS
    assert roles.role_of(Half(2, 2)) is None
    gradfree.register_layer(Half, "weights", linear=lambda _, x, weight: F.linear(x, weight) / 2)
    layer, x, e = Half(4, 3), torch.randn(2, 4), torch.randn(2, 3)
    assert roles.role_of(layer) is roles.Role.WEIGHTS
    assert torch.equal(roles.linear_part(layer, x), layer(x))
    torch.testing.assert_close(roles.adjoint(layer, e, x.shape), e @ layer.weight / 2)


class AlwaysDropped(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


def test_random_layers_have_the_same_mask_again_in_evaluation_too():
    gradfree.register_layer(AlwaysDropped, "dropout")
    net, x = nn.Sequential(nn.Linear(8, 8), AlwaysDropped(), nn.Linear(8, 8), nn.Linear(8, 4)).eval(), torch.randn(5, 8)
    found = []
    for streaming in (False, True):
        torch.manual_seed(3)
        with gradfree.create_engine("foton", streaming=streaming).attach(net):
            found.append(gradients(net, lambda: net(x)))
    assert_equal_gradients(found[1], found[0])


def test_layers_with_random_weights_are_not_known():
    """A second look at the weight would draw another mask."""
    net, x = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)), torch.randn(4, 5)
    nn.utils.parametrize.register_parametrization(net[2], "weight", nn.Dropout(0.5))
    assert roles.role_of(net[2]) is None
    torch.manual_seed(3)
    expected = net(x)
    with gradfree.create_engine("fa").attach(net) as handle:
        torch.manual_seed(3)
        assert torch.equal(net(x), expected)
        assert list(handle.chains[""].blocks) == ["0"]


def test_registering_a_known_class_again_replaces_its_transpose_too():
    gradfree.register_layer(nn.Linear, "weights", linear=lambda _, x, weight: F.linear(x, weight).flip(-1))
    layer, e = nn.Linear(4, 3), torch.randn(2, 3)
    torch.testing.assert_close(roles.adjoint(layer, e, torch.Size((2, 4))), e.flip(-1) @ layer.weight)


def test_parameters_that_would_get_no_gradient_are_refused():
    gradfree.register_layer(nn.PReLU, "pointwise")
    net = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2))
    with gradfree.create_engine("dfa").attach(net):
        with pytest.raises(gradfree.ChainError, match=r"1 is a PReLU, .* but trains parameters"):
            net(torch.randn(3, 4))
        net[1].requires_grad_(False)
        net(torch.randn(3, 4)).sum().backward()


def test_wrong_registrations_are_refused_and_change_nothing():
    before, linear = dict(roles._KNOWN), F.linear
    with pytest.raises(ValueError, match=r"no role is called 'weight'; there are: weights, .* Did you mean 'weights'?"):
        gradfree.register_layer(OwnLinear, "weight", linear=linear)
    for role in ("weights", "max"):
        with pytest.raises(TypeError, match=f"OwnLinear: the role '{role}' needs the function 'linear'"):
            gradfree.register_layer(OwnLinear, role)
    for role in ("linear", "pointwise", "dropout"):
        with pytest.raises(TypeError, match=f"the role '{role}' does not use a function 'linear'"):
            gradfree.register_layer(OwnLinear, role, linear=linear)
    with pytest.raises(TypeError, match="a class of modules"):
        gradfree.register_layer(OwnSoftsign(), "pointwise")
    assert before == roles._KNOWN
