"""Step functions of many kinds, run by ``gradfree.scan`` and by a loop."""

import random
import warnings

import torch
import torch.nn.functional as F
from oracles import off_by
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import gradfree

B, I, H = 3, 3, 8  # noqa: E741


def loop(step, carry, xs, dim=0, reverse=False):
    """The plain loop, step by step."""
    xs = tree_map(lambda x: None if x is None else x.movedim(dim, 0), xs)
    length = next(len(x) for x in tree_leaves(xs) if x is not None)
    ys = []
    for t in reversed(range(length)) if reverse else range(length):
        carry, y = step(carry, tree_map(lambda x: None if x is None else x[t], xs))  # noqa: B023
        ys.append(y)
    ys = ys[::-1] if reverse else ys

    def stack(*of_steps):
        if of_steps[0] is None:
            return None
        stacked = torch.stack(of_steps)
        return stacked.movedim(0, dim) if dim < stacked.dim() else stacked

    return carry, tree_map(stack, *ys)


class OldSpike(torch.autograd.Function):
    """A surrogate gradient in the form that vmap has no rule for."""

    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx, g):
        (u,) = ctx.saved_tensors
        return g / (1 + (3 * u).abs()) ** 2


class Spike(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(u):
        return (u > 0).to(u.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    backward = OldSpike.backward


class Scale(torch.autograd.Function):
    """Takes a weight that no TorchFunctionMode sees."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h, w):
        return h * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        h, w = ctx.saved_tensors
        return g * w, g * h


def both(value):
    return value, value


def same(make):
    """A kind whose carry is its output."""
    return lambda t: _same(t, *make(t))


def _same(t, params, cell, *rest):
    init, xs = rest if rest else (torch.zeros(B, H), t.x)
    return params, lambda h, x: both(cell(h, x)), init, xs


def gru(t):
    cell = nn.GRUCell(I, H)
    return [*cell.parameters()], lambda h, x: cell(x, h)


def lstm(t):
    cell = nn.LSTMCell(I, H)

    def step(c, x):
        c = cell(x, c)
        return c, c[0]

    return [*cell.parameters()], step, (torch.zeros(B, H), torch.zeros(B, H)), t.x


def rnn(t, nonlinearity="tanh"):
    cell = nn.RNNCell(I, H, nonlinearity=nonlinearity)
    return [*cell.parameters()], lambda h, x: cell(x, 0.7 * h)


def relu_without_bias(t):
    cell = nn.RNNCell(I, H, bias=False, nonlinearity="relu")
    return [*cell.parameters()], lambda h, x: cell(x, 0.4 * h)


def embedding(t):
    cell, table = nn.GRUCell(I, H), nn.Embedding(20, I)
    xs = torch.randint(0, 20, (t.length, B))
    return [*cell.parameters(), *table.parameters()], lambda h, x: cell(table(x), h), torch.zeros(B, H), xs


def convolution(t):
    net = nn.Conv2d(3, 2, 3, padding=1)
    xs = torch.randn(t.length, B, 1, 4, 4)
    return [*net.parameters()], lambda h, x: net(torch.cat([x, h], 1)).tanh(), torch.zeros(B, 2, 4, 4), xs


def attention(t):
    cell, query, encoder, source = nn.GRUCell(I, H), nn.Linear(H, H), nn.Linear(5, H), torch.randn(B, 1, 6, 5)
    memory = encoder(source).tanh()

    def step(h, x):
        found = F.scaled_dot_product_attention(query(h)[:, None, None], memory, memory)[:, 0, 0]
        return cell(x, 0.5 * h + 0.1 * found)

    return [*cell.parameters(), *query.parameters(), *encoder.parameters()], step


def shared_with_outside(t):
    """The step uses a weight, and a tensor that was computed from the same weight."""
    weight = nn.Parameter(torch.randn(H, H) / 4)
    read = nn.Linear(I, H)
    outside = weight.sin() * 0.3
    return [weight, *read.parameters()], lambda h, x: torch.tanh(read(x) + h @ weight + h @ outside)


def two_from_one_node(t):
    weight = nn.Parameter(torch.randn(2, H, H) / 4)
    a, b = (weight * 1.0).unbind()
    c = a * 0.5
    read = nn.Linear(I, H)
    return [weight, *read.parameters()], lambda h, x: torch.tanh(read(x) + h @ a - h @ b + h @ c)


def uses_its_initial_state(t):
    start, read = nn.Parameter(torch.randn(B, H) / 2), nn.Linear(I, H)
    return [start, *read.parameters()], lambda h, x: torch.tanh(0.5 * h + read(x) * start), start, t.x


def learnt_start(t):
    start, cell = nn.Parameter(torch.randn(1, H)), nn.GRUCell(I, H)
    return [start, *cell.parameters()], lambda h, x: cell(x, h), start.expand(B, H), t.x


def mixes_samples(t):
    cell = nn.GRUCell(I, H)

    def step(h, x):
        h = cell(x, h)
        return h - 0.1 * h.mean(0, keepdim=True)

    return [*cell.parameters()], step


def without_batch(t):
    net = nn.Linear(I + H, H)
    return [*net.parameters()], lambda h, x: net(torch.cat([x, h])).tanh(), torch.zeros(H), t.x[:, 0]


def kalman(t):
    a, r, c = nn.Parameter(0.8 * torch.eye(4) + 0.02 * torch.randn(4, 4)), nn.Parameter(torch.eye(3)), torch.randn(3, 4)

    def step(carry, x):
        m, p = carry
        m, p = m @ a.T, a @ p @ a.T + 0.1 * torch.eye(4)
        k = torch.linalg.solve(c @ p @ c.T + r @ r.T, c @ p).T
        m, p = m + (x - m @ c.T) @ k.T, p - k @ c @ p
        return (m, p), m

    return [a, r], step, (torch.zeros(B, 4), torch.eye(4)), t.x


def in_place(t):
    params, cell = gru(t)
    return params, lambda h, x: cell(h, x).clone().mul_(0.99)


def indexed_write(t):
    params, cell = gru(t)

    def step(h, x):
        h = cell(h, x).clone()
        h[:, 0] = h[:, 0] * 0.5
        return h

    return params, step


def masked(t):
    params, cell = gru(t)
    xs = {"x": t.x, "keep": torch.rand(t.length, B, 1) > 0.2, "none": None}

    def step(h, x):
        return torch.where(x["keep"], cell(h, x["x"]), h)

    return params, step, torch.zeros(B, H), xs


def data_dependent(t):
    params, cell = gru(t)

    def step(h, x):
        after = cell(h, x)
        return torch.where(after > 0.2, after * 0.5, after)

    return params, step


def top(t):
    params, cell = gru(t)

    def step(h, x):
        n = cell(h, x) * 0.6
        return n * (n >= n.topk(4, -1)[0][..., -1:]).to(n.dtype) + 0.5 * n

    return params, step


def trees(t):
    params, cell = gru(t)

    def step(c, x):
        h = cell(c["h"], x[0])
        return {"h": h, "none": None}, {"a": h, "b": (h.sum(-1), None)}

    return params, step, {"h": torch.zeros(B, H), "none": None}, (t.x, None)


def no_outputs(t):
    params, cell = gru(t)
    return params, lambda h, x: (cell(h, x), None), torch.zeros(B, H), t.x


def counter(t):
    params, cell = gru(t)

    def step(c, x):
        h = cell(c[0], x) / (1 + 0 * c[1])
        return (h, c[1] + 1), (h, c[1])

    return params, step, (torch.zeros(B, H), torch.zeros((), dtype=torch.long)), t.x


def flags(t):
    params, cell = gru(t)

    def step(c, x):
        h = torch.where(c[1], cell(c[0], x), 0.5 * c[0])
        return (h, x[:, :1] > 0), h

    return params, step, (torch.zeros(B, H), torch.ones(B, 1, dtype=torch.bool)), t.x


def complex_state(t):
    a = nn.Parameter(torch.randn(3, 4))

    def step(h, x):
        h = torch.tanh(h.abs()) * torch.exp(0.1j * h.angle()) * 0.5 + x @ a
        return h, h.real

    return [a], step, torch.zeros(B, 4, dtype=torch.complex128), t.x


def spikes(function):
    def make(t):
        read = nn.Linear(I, H)

        def step(u, x):
            v = 0.6 * u + 2 * read(x)
            z = function.apply(v - 1)
            return v - z.detach(), z

        return [*read.parameters()], step, torch.zeros(B, H), t.x

    return make


def unseen_weight(t):
    weight = nn.Parameter(torch.rand(H) / 2)
    read = nn.Linear(I, H)
    return [weight, *read.parameters()], lambda h, x: Scale.apply(h, weight) + read(x)


def unseen_inner(t):
    weight = nn.Parameter(torch.rand(H) / 2)
    inner, read = weight.sin(), nn.Linear(I, H)
    return [weight, *read.parameters()], lambda h, x: Scale.apply(h, inner) + read(x) * weight


def batch_norm(training):
    def make(t):
        params, cell = gru(t)
        norm = nn.BatchNorm1d(H).train(training)
        return params, lambda h, x: norm(cell(h, x)) * 0.5

    return make


def frozen(t):
    cell, extra = nn.GRUCell(I, H), nn.Parameter(torch.randn(3))
    cell.weight_ih.requires_grad_(False)
    return [cell.weight_hh, extra], lambda h, x: cell(x, h)


def detached_carry(t):
    params, cell = gru(t)

    def step(h, x):
        h = cell(h, x)
        return h.detach(), h

    return params, step, torch.zeros(B, H), t.x


def nested(t):
    params, cell = gru(t)

    def step(h, x):
        inner, _ = gradfree.scan(lambda c, v: both(0.5 * c + v.sum()), h.mean(), x)
        return cell(h, x) + 0.01 * inner

    return params, step


def dropout(t):
    params, cell = gru(t)
    return params, lambda h, x: F.dropout(cell(h, x), 0.1)


def python_random(t):
    params, cell = gru(t)
    return params, lambda h, x: cell(h, x) * random.random()


def branch(t):
    params, cell = gru(t)
    return params, lambda h, x: cell(h, x if x.sum() > 0 else -x)


def appends(t):
    params, cell = gru(t)
    taps = []

    def step(h, x):
        taps.append(h)
        return cell(h, x)

    return params, step


def counts(t):
    params, cell = gru(t)
    calls = 0

    def step(h, x):
        nonlocal calls
        calls += 1
        return cell(h, x) / calls

    return params, step


def buffer_in_place(t):
    params, cell = gru(t)
    steps = torch.zeros(())

    def step(h, x):
        steps.add_(1)
        return cell(h, x) / steps.clone()

    return params, step


def overwrites_its_carry(t):
    params, cell = gru(t)
    return params, lambda h, x: cell(h.mul_(0.9), x) if not h.requires_grad else cell(h * 0.9, x)


def hook_on_carry(t):
    params, cell = gru(t)

    def step(h, x):
        if h.requires_grad:
            h.register_hook(lambda g: 0.5 * g)
        return cell(h, x)

    return params, step, torch.zeros(B, H, requires_grad=True), t.x


def checkpointed(t):
    params, cell = gru(t)
    return params, lambda h, x: checkpoint(cell, h, x, use_reentrant=False)


def narrow_start(t):
    params, cell = gru(t)
    return params, lambda h, x: cell(h.expand(B, H), x), torch.zeros(1, H), t.x


KINDS = {
    "GRUCell": (same(gru), True),
    "LSTMCell": (lstm, True),
    "RNNCell": (same(rnn), True),
    "RNNCell, ReLU": (same(relu_without_bias), True),
    "embedding of integers": (same(embedding), True),
    "convolution": (same(convolution), True),
    "attention over outside states": (same(attention), True),
    "a weight and a tensor made of it": (same(shared_with_outside), True),
    "two outputs of one node": (same(two_from_one_node), True),
    "its initial state again": (same(uses_its_initial_state), True),
    "learnt initial state": (same(learnt_start), True),
    "mixes samples": (same(mixes_samples), True),
    "no batch dimension": (same(without_batch), True),
    "Kalman filter": (kalman, True),
    "in place on a new tensor": (same(in_place), True),
    "indexed write": (same(indexed_write), True),
    "dict of inputs with a mask": (same(masked), True),
    "where on values": (same(data_dependent), True),
    "topk": (same(top), True),
    "trees with None": (trees, True),
    "no outputs": (no_outputs, True),
    "counter in the carry": (counter, True),
    "booleans in the carry": (flags, True),
    "complex state": (complex_state, True),
    "spikes with a vmap rule": (spikes(Spike), True),
    "a weight that only a Function takes": (same(unseen_weight), True),
    "an outside tensor that only a Function takes": (same(unseen_inner), True),
    "BatchNorm in evaluation": (same(batch_norm(False)), True),
    "frozen and unused parameters": (same(frozen), True),
    "detached carry": (detached_carry, True),
    "scan inside": (same(nested), True),
    "dropout": (same(dropout), False),
    "Python's random numbers": (same(python_random), False),
    "branch on values": (same(branch), False),
    "appends to a list": (same(appends), False),
    "counts its calls": (same(counts), False),
    "counts in a tensor": (same(buffer_in_place), False),
    "overwrites its carry": (same(overwrites_its_carry), False),
    "hook on its carry": (same(hook_on_carry), False),
    "checkpoint inside": (same(checkpointed), False),
    "old form of Function": (spikes(OldSpike), False),
    "BatchNorm in training": (same(batch_norm(True)), False),
    "carry that grows": (same(narrow_start), False),
}


class CutTask:
    """A kind of step with its inputs; runs it in seven segments, or in a loop."""

    def __init__(self, kind, length):
        self.kind, self.length = kind, length
        self.was_cut, self.messages = False, []

    def make(self):
        torch.manual_seed(0)
        random.seed(0)
        self.x = torch.randn(self.length, B, I, requires_grad=True)
        self.params, self.step, self.init, self.xs = KINDS[self.kind][0](self)

    def gradients(self, run):
        self.make()
        carry, ys = run(self.step, self.init, self.xs)
        outputs = [t for t in tree_leaves((carry, ys)) if t is not None]
        real = [t.abs() if t.is_complex() else t for t in outputs]
        loss = sum((t.to(torch.float64).sin() * (1 + n)).sum() for n, t in enumerate(real))
        live = [p for p in (*self.params, self.x) if p.requires_grad]
        grads = torch.autograd.grad(loss, live, allow_unused=True)
        return [t.detach() for t in real], grads

    def cut(self, step, init, xs, **options):
        engine = gradfree.create_engine("shooting", segments=7, burn=6, max_sweeps=6, tolerance=1e-14)
        return gradfree.scan(step, init, xs, engine=engine, **options)


def compare(task):
    """Return the largest difference between the loop and the segments."""
    expected, expected_grads = task.gradients(loop)
    with warnings.catch_warnings(record=True) as caught, gradfree.engine_figures() as figures:
        warnings.simplefilter("always")
        actual, grads = task.gradients(task.cut)
    task.messages = [str(w.message) for w in caught]
    task.was_cut = any(of["sequential"] == 0 for of in figures.values())
    assert [g is None for g in grads] == [g is None for g in expected_grads]
    pairs = [(a, e) for a, e in zip((*actual, *grads), (*expected, *expected_grads), strict=True) if e is not None]
    wide = [(a.to(torch.float64), e.to(torch.float64)) for a, e in pairs]
    return off_by(*zip(*wide, strict=True))
