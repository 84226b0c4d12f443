"""Torch's recurrent modules, to compare gradients."""

import torch
from torch import nn

INPUT, HIDDEN = 3, 4


def everything(module, x, *states):
    """Return outputs, final states and gradients of a loss on all of them."""
    out, final = module(x, *states)
    parts = [out, *(final if isinstance(final, tuple) else [final])]
    loss = sum((part * torch.linspace(-1, 2, part.numel()).view(part.shape)).sum() for part in parts)
    return [*parts, *torch.autograd.grad(loss, [x, *states, *module.parameters()])]


def remembering(bias=8.0, kind=nn.GRU):
    """Return a layer with long memory: its update or forget gates are nearly 1."""
    layer = kind(3, 8)
    with torch.no_grad():
        layer.bias_ih_l0[8:16] = bias
    return layer


def chaotic():
    """Return a chaotic RNN: trajectories from different initial states diverge."""
    rnn = nn.RNN(3, 8)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(torch.randn(8, 8, generator=torch.Generator("cpu").manual_seed(1)) * 2)
    return rnn
