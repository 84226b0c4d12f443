"""Training with any engine of layers lowers the loss."""

import pytest
import torch
import torch.nn.functional as F
from layered_nets import dense
from sklearn.datasets import load_digits
from torch import nn

import gradfree


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
