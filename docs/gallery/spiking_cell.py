"""Leaky integrate-and-fire neurons with a surrogate gradient, on digits shown row by row: a loop, and compiled scan."""

import time
from functools import partial

import torch
from drawing import SHORT, save
from sklearn.datasets import load_digits

import gradfree

UPDATES, HELD = (2, 4) if SHORT else (100, 64)  # HELD: for how many steps a row of pixels is shown


def spike(v):
    """Return 1 above 0, else 0, with the derivative of a fast sigmoid."""
    soft = v / (1 + 10 * v.abs())
    return (v > 0).to(v.dtype) + (soft - soft.detach())


def loop(step, v, xs):
    spikes = []
    for x in xs:
        v, s = step(v, x)
        spikes.append(s)
    return v, torch.stack(spikes)


images, labels = map(torch.tensor, load_digits(return_X_y=True))
rows = (images.float().view(-1, 8, 8).transpose(0, 1) / 8).repeat_interleave(HELD, 0)  # (T, N, 8)


def train(run):
    torch.manual_seed(0)
    into, out = torch.nn.Linear(8, 64), torch.nn.Linear(8 * 64, 10)

    def step(v, x):
        v = 0.8 * v + into(x)
        fired = spike(v - 1)
        return v * (1 - fired), fired

    optimizer, curve, seconds = torch.optim.AdamW([*into.parameters(), *out.parameters()], lr=1e-2), [], 0.0
    for batch in torch.randperm(len(labels))[: 8 * UPDATES].split(8):
        start = time.perf_counter()
        _, spikes = run(step, torch.zeros(8, 64), rows[:, batch])
        rates = spikes.unflatten(0, (8, HELD)).mean(1)  # of each neuron during each row, (8, B, 64)
        loss = torch.nn.functional.cross_entropy(out(rates.transpose(0, 1).flatten(1)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds += time.perf_counter() - start if curve else 0.0  # without the first update, which compiles
        curve.append((seconds, loss.item()))
    return curve


torch.set_num_threads(1)
compiled = partial(gradfree.scan, engine="backprop", compile=not SHORT)  # spikes never settle, so nothing is cut
curves = {"Python loop": train(loop), "scan, compiled": train(compiled)}
save("Spiking neurons on digits, row by row, 512 steps", curves, "seconds", "loss")
