"""Step functions of many kinds, with their parameters and inputs."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import uncut_steps
from surrogates import OldSpike, Scale, Spike
from torch import nn

import gradfree

B, I, H = 3, 3, 8  # noqa: E741


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


def scattered(t):
    read = nn.Linear(H, H)

    def step(h, x):
        found, at = (h + x.repeat(1, 3)[:, :H]).topk(2, -1)
        return torch.tanh(0.5 * read(h)) + 0.3 * torch.zeros_like(h).scatter(-1, at, found), found

    return [*read.parameters()], step, torch.zeros(B, H), t.x


def permuted(t):
    linear, order = nn.Linear(I, H), torch.arange(H).roll(1)
    return [*linear.parameters()], lambda h, x: 0.5 * h + 0.4 * torch.tanh(linear(x) + 0.5 * h[..., order])


def sorted_along(t):
    linear = nn.Linear(I, H)

    def step(h, x):
        ordered = torch.take_along_dim(h, h.argsort(-1), -1)
        return 0.5 * h + 0.4 * torch.tanh(linear(x) + 0.5 * ordered)

    return [*linear.parameters()], step


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


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def named_tuple(t):
    weight = nn.Parameter(torch.rand(H) / 2)
    pair, read = Pair(weight.sin(), weight.cos()), nn.Linear(I, H)
    return [weight, *read.parameters()], lambda h, x: torch.tanh(torch.stack(pair).prod(0) * h + read(x))


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


def since_an_event(t):
    """Has the smallest integer for "never"."""
    weight, never = nn.Parameter(torch.randn(I)), torch.iinfo(torch.int64).min

    def step(last, x):
        last = torch.where(x[:, :1] > 9, 0, last)
        return last, torch.where(last == never, 1.0, 2.0) * weight * x

    return [weight], step, torch.full((B, 1), never), t.x


def uncut(make):
    return same(lambda t: make(*gru(t), t.x))


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
    "the smallest integer": (since_an_event, True),
    "mixes samples": (same(mixes_samples), True),
    "no batch dimension": (same(without_batch), True),
    "Kalman filter": (kalman, True),
    "in place on a new tensor": (same(in_place), True),
    "indexed write": (same(indexed_write), True),
    "dict of inputs with a mask": (same(masked), True),
    "where on values": (same(data_dependent), True),
    "topk": (same(top), True),
    "topk, scattered": (scattered, True),
    "permutes its state": (same(permuted), True),
    "sorts its state": (same(sorted_along), True),
    "trees with None": (trees, True),
    "no outputs": (no_outputs, True),
    "counter in the carry": (counter, True),
    "booleans in the carry": (flags, True),
    "complex state": (complex_state, True),
    "spikes with a vmap rule": (spikes(Spike), True),
    "a weight that only a Function takes": (same(unseen_weight), True),
    "an outside tensor that only a Function takes": (same(unseen_inner), True),
    "outside tensors in a named tuple": (same(named_tuple), True),
    "BatchNorm in evaluation": (same(batch_norm(False)), True),
    "frozen and unused parameters": (same(frozen), True),
    "detached carry": (detached_carry, True),
    "scan inside": (same(nested), True),
    "dropout": (uncut(uncut_steps.dropout), False),
    "Python's random numbers": (uncut(uncut_steps.python_random), False),
    "NumPy's random numbers, the second of a pair": (uncut(uncut_steps.numpy_pairs), False),
    "select_scatter": (uncut(uncut_steps.selects_and_scatters), False),
    "index_fill": (uncut(uncut_steps.fills_by_index), False),
    "as_strided": (uncut(uncut_steps.reads_by_strides), False),
    "roll of a number": (uncut(uncut_steps.rolls_a_number), False),
    "any without dimensions": (uncut(uncut_steps.any_along_no_dimension), False),
    "embedding with padding in its carry": (uncut(uncut_steps.reads_a_changing_table_with_padding), False),
    "branch on values": (uncut(uncut_steps.branch), False),
    "appends to a list": (uncut(uncut_steps.appends), False),
    "counts its calls": (uncut(uncut_steps.counts), False),
    "counts in a tensor": (uncut(uncut_steps.buffer_in_place), False),
    **{name: (uncut(kind), False) for name, kind in uncut_steps.COUNTERS.items()},
    "overwrites its carry": (uncut(uncut_steps.overwrites_its_carry), False),
    "hook on its carry": (uncut(uncut_steps.hook_on_carry), False),
    "hook on its carry from the second step on": (uncut(uncut_steps.hook_from_the_second_step_on), False),
    "asks for a graph": (uncut(uncut_steps.asks_for_a_graph), False),
    "checkpoint inside": (uncut(uncut_steps.checkpointed), False),
    "old form of Function": (spikes(OldSpike), False),
    "BatchNorm in training": (same(batch_norm(True)), False),
    "numbers of a wider dtype": (uncut(uncut_steps.wider_numbers), False),
    "carry that grows": (uncut(uncut_steps.narrow_start), False),
}
