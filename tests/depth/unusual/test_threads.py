"""Several threads on one model with an engine."""

import sys
import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from unusual_nets import SAMPLES, WIDTH, Net, Residual

import gradfree

TRAINED = {"a row": lambda: nn.Sequential(*(Residual() for _ in range(6))), "a loop": lambda: Net()}
TOGETHER = {"four train": (4, 0), "two train, two evaluate": (2, 2)}


def run(net, x):
    """Return the output of the blocks of ``net`` for ``x``."""
    return net.states(x)[-1] if isinstance(net, Net) else net(x)


@pytest.fixture
def often():
    """Python switches between threads a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("threads", TOGETHER)
@pytest.mark.parametrize(
    ("model", "batched"), [("a row", "auto"), ("a row", True), ("a row", False), ("a loop", "auto")]
)
def test_threads_on_one_model_get_their_own_gradients(model, batched, threads, often):
    """No error, no wrong gradient, no wrong output."""
    torch.manual_seed(0)
    net, (training, evaluating) = TRAINED[model](), TOGETHER[threads]
    inputs = [torch.randn(SAMPLES, WIDTH) for _ in range(training + evaluating)]
    parameters = [p for name, p in net.named_parameters() if not name.startswith(("scale", "head"))]
    outputs = [run(net, x).detach() for x in inputs]
    expected = [torch.autograd.grad(run(net, x).pow(2).sum(), parameters) for x in inputs]
    started, wrong = threading.Barrier(len(inputs)), []

    def train(x, out, gradients):
        for _ in range(40):
            actual = torch.autograd.grad(run(net, x).pow(2).sum(), parameters)
            assert_close(actual, gradients, rtol=1e-10, atol=1e-12)

    def evaluate(x, out, gradients):
        with torch.no_grad():
            for _ in range(80):
                assert_close(run(net, x), out, rtol=1e-10, atol=1e-12)

    def work(task, *about):
        started.wait()
        try:
            task(*about)
        except Exception as error:
            wrong.append(error)

    with gradfree.create_engine("highway_bp", iterations=6).attach(net, batched=batched):
        torch.autograd.grad(run(net, inputs[0]).pow(2).sum(), parameters)
        tasks = [train] * training + [evaluate] * evaluating
        workers = [
            threading.Thread(target=work, args=about) for about in zip(tasks, inputs, outputs, expected, strict=True)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not wrong, wrong[0]


def test_two_threads_in_one_block_at_the_same_time_get_their_own_gradients():
    torch.manual_seed(0)
    meeting = threading.Barrier(1)

    class Meeting(Residual):
        def forward(self, x):
            meeting.wait(timeout=30)
            return super().forward(x)

    net, inputs, found = nn.Sequential(*(Meeting() for _ in range(6))), torch.randn(2, SAMPLES, WIDTH), {}
    parameters = list(net.parameters())

    def gradients(n):
        found[n] = torch.autograd.grad(net(inputs[n]).pow(2).sum(), parameters)

    expected = [torch.autograd.grad(net(x).pow(2).sum(), parameters) for x in inputs]
    with gradfree.create_engine("highway_bp", iterations=6).attach(net, batched=False):
        meeting = threading.Barrier(2)
        workers = [threading.Thread(target=gradients, args=(n,)) for n in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert_close([found[0], found[1]], expected, rtol=1e-10, atol=1e-12)
