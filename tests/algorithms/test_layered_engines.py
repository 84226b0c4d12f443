"""All engines of layers: their options, and that training with them lowers the loss."""

import pytest
import torch
import torch.nn.functional as F
from layered_nets import dense
from sklearn.datasets import load_digits
from torch import nn

import gradfree


@pytest.mark.parametrize(
    ("engine", "options", "error", "message"),
    [
        ("dfa", {"seed": -1}, ValueError, "DFA: seed must be at least 0, not -1"),
        ("fa", {"seed": "x"}, TypeError, "FA: seed must be an int of at least 0, not 'x'"),
        ("pepita", {"mirror_every": -1}, ValueError, "PEPITA: mirror_every must be at least 0, not -1"),
        ("pepita", {"mirror_rate": 0}, ValueError, "PEPITA: mirror_rate must be positive and finite, not 0"),
        ("pepita", {"mirror_rate": float("nan")}, ValueError, "PEPITA: mirror_rate must be positive and finite"),
        ("pepita", {"mirror_rate": True}, TypeError, "PEPITA: mirror_rate must be a positive number, not True"),
        ("pepita", {"noise": 1}, TypeError, "its options are: seed, mirror_every, mirror_rate"),
        ("orthogonal_backprop", {"orthogonalize_every": 0}, ValueError, "orthogonalize_every must be at least 1"),
        ("orthogonal_backprop", {"streaming": True}, TypeError, "its options are: orthogonalize_every, orthogonalize_"),
    ],
)
def test_wrong_options_are_refused_at_once(engine, options, error, message):
    with pytest.raises(error, match=message):
        gradfree.create_engine(engine, **options)


@pytest.mark.slow
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
