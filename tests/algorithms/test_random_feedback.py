"""Properties of all engines with random feedback."""

import pytest
import torch
import torch.nn.functional as F
from layered_nets import dense, drawn, run
from torch import nn

from gradfree import ChainError
from gradfree.algorithms import DFA, FA, FOTON, PEPITA
from gradfree.testing.cases.models import assert_equal_gradients, gradients

FEEDBACK = {"dfa": DFA(), "fa": FA(), "pepita": PEPITA()}


@pytest.fixture(params=FEEDBACK.values(), ids=FEEDBACK)
def engine(request):
    return request.param


@pytest.mark.parametrize("engine", [*FEEDBACK.values(), FOTON()], ids=str)
def test_a_short_batch_gets_the_mean_gradient_of_its_samples(engine):
    net, x, y = dense(8, 6, 3, bend=nn.Tanh), torch.randn(5, 8), torch.randint(3, (5,))
    with engine.attach(net):
        F.cross_entropy(net(x), y).backward()
        together = {name: p.grad.clone() for name, p in net.named_parameters()}
        net.zero_grad()
        for sample, target in zip(x, y, strict=True):
            (F.cross_entropy(net(sample[None]), target[None]) / 5).backward()
    assert_equal_gradients({name: p.grad for name, p in net.named_parameters()}, together)


def test_an_empty_batch_has_zero_gradients(engine):
    net = dense(8, 6, 3, bend=nn.Tanh)
    found, _ = run(net, torch.randn(0, 8), engine)
    assert all((g == 0).all() for g in found.values())


def test_the_feedback_depends_only_on_the_seed(engine):
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(4, 8)
    _, first = run(net, x, engine)
    torch.manual_seed(7)
    with engine.attach(net) as handle:
        out = net(x)
        state = torch.get_rng_state()
        out.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        again = drawn(handle)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    _, third = run(net, x, type(engine)(seed=1))
    assert not any(torch.equal(first[key], third[key]) for key in first)
    assert len({matrix.flatten()[0].item() for matrix in first.values()}) == len(first)


def test_a_loss_on_an_earlier_state_uses_a_separate_matrix(engine):
    """The state has another width; the matrices of the whole chain do not change."""
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(4, 8)
    with engine.attach(net) as handle:
        expected = {name: g.clone() for name, g in gradients(net, lambda: net(x)).items()}
        before = handle.state_dict()[""]
        part = gradients(net, lambda: net[3](net[2](net[1](net[0](x)))))
        assert part["4.weight"] is None or (part["4.weight"] == 0).all()
        assert part["0.weight"].abs().max() > 0
        assert before.items() <= handle.state_dict()[""].items()
        assert_equal_gradients(gradients(net, lambda: net(x)), expected, tolerance=0.0)


@pytest.mark.parametrize("engine", [DFA(), PEPITA(), FOTON(refresh_feedback_every=2)], ids=str)
def test_outputs_other_than_samples_by_classes_are_refused(engine):
    net = dense(6, 5, 4)
    with engine.attach(net):
        out = net(torch.randn(3, 7, 6))
        with pytest.raises(ChainError, match=r"takes outputs \(samples, classes\), but '1' returns \(3, 7, 4\)"):
            out.sum().backward()
