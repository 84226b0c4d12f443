"""Chunks in generated C++: the loop's results and gradients, and what is not compiled for it."""

import pytest
import torch
from oracles import off_by
from scan_tasks import CompiledTask, compare, loop
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import gradfree
from gradfree import CellLayer

T, B, I, H = 44, 2, 3, 8  # noqa: E741

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Let the C++ compiler see three steps instead of eight: it takes a second for each of a chunk's kernels."""
    monkeypatch.setattr("gradfree.loops.compiled.CHUNK", 3)


def test_segments_of_steps_that_index_are_compiled_and_right():
    task = CompiledTask("permutes its state")
    assert compare(task) < 1e-10
    assert not [message for message in task.messages if "runs uncompiled" in message]


def test_gradients_of_indexing_that_were_zero_in_the_first_call_are_right_later_and_twice(recwarn):
    """With fused loops torch 2.13 has wrong gradients of a permutation, and none of a sort: a crash.

    A comparison of gradients in the first call, where the gain is zero, sees nothing of that.
    """
    weight, gain = (torch.randn(size, requires_grad=True) for size in ((I, H), (H,)))
    x, value = torch.randn(56, B, I, requires_grad=True), gain.detach().clone()
    order = torch.arange(H).roll(1)

    def step(h, x):
        ordered = torch.take_along_dim(h, h.argsort(-1), -1)
        h = 0.5 * h + 0.4 * torch.tanh(x @ weight + gain * (h[..., order] + 0.5 * ordered))
        return h, h

    def gradients(run, **options):
        _, y = run(step, torch.zeros(B, H), x, **options)
        loss, leaves = (y * torch.arange(H)).sum(), [weight, gain, x]
        return [g for again in (True, False) for g in torch.autograd.grad(loss, leaves, retain_graph=again)]

    for gain.data in (torch.zeros(H), value):
        found = gradients(gradfree.scan, engine="backprop", compile=True)
        assert off_by(found, gradients(loop)) < 1e-10
    assert not [w for w in recwarn if "runs uncompiled" in str(w.message)]


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, h, x):
        self.seen.add_(1.0)
        return torch.tanh(h + x), self.seen * x


def test_a_step_that_counts_is_compiled_and_runs_once_for_each_input(recwarn):
    step, x = Counter(), torch.randn(T, B, H)
    torch._dynamo.utils.counters.clear()
    _, found = gradfree.scan(step, torch.zeros(B, H), x, engine="backprop", compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert step.seen.item() == T
    assert off_by([found], [loop(Counter(), torch.zeros(B, H), x)[1]]) < 1e-12
    assert not [w for w in recwarn if "runs uncompiled" in str(w.message)]


def test_a_step_that_draws_is_compiled(recwarn):
    x, size = torch.ones(T, B, H), 64
    _, found = gradfree.scan(
        lambda h, x: (h, nn.functional.dropout(x.repeat(1, size))), torch.zeros(1), x, engine="backprop", compile=True
    )
    assert 0.9 < found.mean() < 1.1
    assert not [w for w in recwarn if "runs uncompiled" in str(w.message)]


class Weightless(nn.Module):
    def forward(self, x, h):
        return torch.tanh(x + 0.5 * h.sin())


def of_func(run, x, dx):
    return torch.func.jvp(run, (x,), (dx,))


def of_dual_numbers(run, x, dx):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(run(forward_ad.make_dual(x, dx)))


def without_values(run, x, dx):
    return [torch.zeros_like(y, device="cpu") for y in (run(x.to("meta")), run(dx.to("meta")))]


def fake(run, x, dx):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shape = run(mode.from_tensor(x)).shape
    return [torch.zeros(shape)]


def traced(run, x, dx):
    return [make_fx(run)(x)(dx)]


@pytest.mark.parametrize("differentiate", [of_func, of_dual_numbers, without_values, fake, traced])
@pytest.mark.parametrize("engine", ["backprop", "shooting", None])
def test_passes_of_other_kinds_run_uncompiled(engine, differentiate):
    """What is compiled has no tangents, and cannot be traced or run without values."""
    layer, (x, dx) = CellLayer(Weightless(), compile=True), torch.randn(2, T, B, H)

    def step(h, x):
        h = layer.cell(x, h)
        return h, h

    def run(x):
        start = x.new_zeros(B, H)
        if engine is None:
            return layer(x, start)[0]
        return gradfree.scan(step, start, x, engine=engine, compile=True)[1]

    torch._dynamo.utils.counters.clear()
    found = differentiate(run, x, dx)
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert off_by(found, differentiate(lambda x: loop(step, x.new_zeros(B, H), x)[1], x, dx)) < 1e-10
