"""The inputs of a running ``torch.autograd.grad``."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gradfree import ChainError
from gradfree.torchside.private import asked_for


class Asking(torch.autograd.Function):
    elsewhere = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        if Asking.elsewhere:
            with ThreadPoolExecutor(1) as pool:
                Asking.found = pool.submit(lambda: [*asked_for()]).result()
        else:
            Asking.found = [*asked_for()]
        return cotangent


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the thread of the call", "in another, as on a GPU"])
def test_a_node_finds_the_inputs_of_autograd_grad(elsewhere, monkeypatch):
    monkeypatch.setattr(Asking, "elsewhere", elsewhere)
    x = torch.randn(3, requires_grad=True)
    first, second = Asking.apply(x).unbind(0)[:2]
    torch.autograd.grad(first + second, [second, x], retain_graph=True)
    assert Asking.found == [(second.grad_fn, 1)]
    (first + second).backward()
    assert Asking.found == []


def test_a_call_of_autograd_in_another_form_raises(monkeypatch):
    """As a torch would make it that passes the inputs by name."""
    x = torch.randn(3, requires_grad=True)
    monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", called_otherwise)
    monkeypatch.setattr(Asking, "found", None, raising=False)
    with pytest.raises(ChainError, match="_engine_run_backward"):
        torch.autograd.graph._engine_run_backward((Asking.apply(x).sum(),), inputs=(x,))


def called_otherwise(outputs, *args, inputs):
    ones = tuple(map(torch.ones_like, outputs))
    engine = torch.autograd.Variable._execution_engine
    return engine.run_backward(outputs, ones, False, False, inputs, allow_unreachable=True, accumulate_grad=False)
