"""A cell of one's own, the LayerNorm-GRU of world models: a Python loop over time, and gradfree.scan."""

import time

import torch
from drawing import SHORT, save

import gradfree

UNITS, LENGTHS, REPEATS = (16, (64, 128), 2) if SHORT else (64, (256, 1024, 4096), 16)
read, norm = torch.nn.Linear(32 + UNITS, 3 * UNITS, bias=False), torch.nn.LayerNorm(3 * UNITS)


def step(h, x):
    reset, candidate, update = norm(read(torch.cat([x, h], -1))).chunk(3, -1)
    update = torch.sigmoid(update - 1)
    h = update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * h
    return h, h


def loop(step, h, xs):
    outputs = []
    for x in xs:
        h, y = step(h, x)
        outputs.append(y)
    return h, torch.stack(outputs)


def seconds(run, length):
    """Return the least time of a training step; scan finds its fastest way in the first ones."""
    xs, taken = torch.randn(length, 1, 32), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        _, outputs = run(step, torch.zeros(1, UNITS), xs)
        outputs.square().mean().backward()
        taken.append(time.perf_counter() - start)
    return min(taken)


torch.set_num_threads(1)
torch.manual_seed(0)
curves = {
    "Python loop": [(length, seconds(loop, length)) for length in LENGTHS],
    "gradfree.scan": [(length, seconds(gradfree.scan, length)) for length in LENGTHS],
}
save("A training step of a cell of one's own", curves, "steps of the sequence", "seconds")
