"""Several threads on one model with an engine."""

import sys
import threading

import pytest
import torch
from torch.testing import assert_close

import gradfree
from gradfree.testing.cases.models import LayeredModel, Plain


@pytest.fixture
def often():
    """Python switches between threads a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    yield
    sys.setswitchinterval(before)


def gradients(model, x):
    """Return the gradients of a pass without ``.grad``, which the threads share."""
    return torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))


def together(works):
    """Run each of ``works`` in a thread and return their results."""
    results = [None] * len(works)

    def run(n):
        results[n] = works[n]()

    workers = [threading.Thread(target=run, args=(n,)) for n in range(len(works))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


@pytest.mark.parametrize("batched", [True, False])
def test_threads_on_one_model_get_their_own_gradients(batched, often):
    """Three train and one evaluates."""
    model, inputs = LayeredModel(*(Plain() for _ in range(6))), torch.randn(4, 3, 6)
    exact, out = [gradients(model, x) for x in inputs], model(inputs[0]).detach()

    def train(n):
        return all(
            torch.allclose(a, e, 1e-10)
            for _ in range(40)
            for a, e in zip(gradients(model, inputs[n]), exact[n], strict=True)
        )

    def evaluate():
        with torch.no_grad():
            return all(torch.equal(model(inputs[0]), out) for _ in range(80))

    with gradfree.create_engine("highway_bp", iterations=6).attach(model, ["blocks"], batched=batched):
        assert together([*(lambda n=n: train(n) for n in (1, 2, 3)), evaluate]) == [True] * 4


def test_two_threads_in_one_block_at_the_same_time_get_their_own_gradients():
    meeting = threading.Barrier(1)

    class Meeting(Plain):
        def forward(self, x):
            meeting.wait(timeout=30)
            return super().forward(x)

    model, inputs = LayeredModel(*(Meeting() for _ in range(6))), torch.randn(2, 3, 6)
    expected = [gradients(model, x) for x in inputs]
    with gradfree.create_engine("highway_bp", iterations=6).attach(model, ["blocks"], batched=False):
        meeting = threading.Barrier(2)
        found = together([lambda: gradients(model, inputs[0]), lambda: gradients(model, inputs[1])])
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
