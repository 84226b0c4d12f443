"""Step functions that cannot run in segments; each makes parameters and a step from the cell that it is given."""

import random

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def dropout(params, cell, x):
    return params, lambda h, x: F.dropout(cell(h, x), 0.1)


def python_random(params, cell, x):
    return params, lambda h, x: cell(h, x) * random.random()


def branch(params, cell, x):
    return params, lambda h, x: cell(h, x if x.sum() > 0 else -x)


def appends(params, cell, x):
    taps = []

    def step(h, x):
        taps.append(h)
        return cell(h, x)

    return params, step


def counts(params, cell, x):
    calls = 0

    def step(h, x):
        nonlocal calls
        calls += 1
        return cell(h, x) / calls

    return params, step


def buffer_in_place(params, cell, x):
    steps = torch.zeros(())

    def step(h, x):
        steps.add_(1)
        return cell(h, x) / steps.clone()

    return params, step


def overwrites_its_carry(params, cell, x):
    return params, lambda h, x: cell(h.mul_(0.9), x) if not h.requires_grad else cell(h * 0.9, x)


def hook_on_carry(params, cell, x):

    def step(h, x):
        if h.requires_grad:
            h.register_hook(lambda g: 0.5 * g)
        return cell(h, x)

    return params, step, torch.zeros(x.shape[1], params[0].shape[0] // 3, requires_grad=True), x


def hook_from_the_second_step_on(params, cell, x):

    def step(h, x):
        if h.requires_grad:
            h.register_hook(lambda g: 0.5 * g)
        return cell(h, x)

    return params, step


def asks_for_a_graph(params, cell, x):

    def step(h, x):
        h = cell(h, x)
        return h if h.grad_fn is None else 0.9 * h

    return params, step


def checkpointed(params, cell, x):
    return params, lambda h, x: checkpoint(cell, h, x, use_reentrant=False)


def narrow_start(params, cell, x):
    return params, lambda h, x: cell(h.expand(x.shape[1], -1), x), torch.zeros(1, params[0].shape[0] // 3), x
