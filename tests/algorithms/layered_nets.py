"""Small nets of layers, and their gradients together with an engine's state."""

from itertools import pairwise

import torch
from torch import nn

from gradfree.testing.cases.models import gradients


def dense(*widths, bend=None):
    """Linear layers of ``widths``, with ``bend`` between them."""
    layers = [nn.Linear(before, after) for before, after in pairwise(widths)]
    if bend is None:
        return nn.Sequential(*layers)
    return nn.Sequential(*[part for layer in layers[:-1] for part in (layer, bend())], layers[-1])


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
    "dropout": (lambda: dense(8, 6, 5, 3, bend=lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.4))), (4, 8)),
    "convolutions": (convolutions, (4, 2, 8, 8)),
    "max pool": (lambda: convolutions(nn.MaxPool2d), (4, 2, 8, 8)),
}


def two_passes(net, x, errors, feedback, second=False):
    """Return the gradients of a Linear-Tanh net from two passes, sample by sample: from x, and from x - F e, |e| = 1.

    Weights get the inputs of the first pass, as in FOTON, or of the ``second`` one, as in PEPITA.
    """
    layers = list(with_weights(net).values())
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    with torch.no_grad():
        for sample, e in zip(x, errors, strict=True):
            h, other = sample, sample - feedback @ (e / e.norm())
            for layer in layers:
                given = other if second else h
                h, other = layer(h).tanh(), layer(other).tanh()
                delta = e if layer is layers[-1] else e.norm() * (h - other)
                layer.weight.grad += torch.outer(delta, given)
                layer.bias.grad += delta
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def run(net, x, engine=None):
    """Return the gradients, always with the same dropout masks, and the engine's random matrices."""
    torch.manual_seed(3)
    if engine is None:
        return gradients(net, lambda: net(x)), {}
    with engine.attach(net, [""]) as handle:
        return gradients(net, lambda: net(x)), drawn(handle)


def drawn(handle, path=""):
    """Return the random matrices that an engine keeps for a chain, by "path shape"."""
    return {key.removeprefix("feedback: "): matrix for key, matrix in handle.state_dict().get(path, {}).items()}


def with_weights(net):
    return {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)}
