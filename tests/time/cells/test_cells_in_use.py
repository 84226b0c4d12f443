"""What a user may do to a cell while an engine is on it: gradients stay autograd's, or the pass is refused."""

import copy

import pytest
import torch
from cell_tasks import CELLS, INPUT, refusal
from oracles import assert_close
from torch.nn.modules.module import register_module_forward_hook

import gradfree
from gradfree import CellLayer

STEPS, BATCH = 6, 2


def made(cell):
    make, _ = CELLS[cell]
    return CellLayer(make())


def initial(cell, batch=BATCH):
    parts = tuple(torch.full((batch, width), 0.3) for width in CELLS[cell][1])
    return parts if len(parts) > 1 else parts[0]


def attached(model):
    return gradfree.create_engine("backprop").attach(model)


def tensors(found):
    return [found] if isinstance(found, torch.Tensor) else [t for each in found for t in tensors(each)]


def loss_of(found):
    return sum((torch.sin(t) * n).sum() for n, t in enumerate(tensors(found), 1))


def gradients(model, run, x):
    """Return what ``run(model, x)`` gives and all gradients that are there behind it."""
    x = x.clone().requires_grad_()
    found = run(model, x)
    return [*tensors(found or ()), x.grad, *(p.grad for p in model.parameters())]


def assert_autograds(model, run):
    x, plain = torch.randn(STEPS, BATCH, INPUT), copy.deepcopy(model)
    expected = gradients(plain, run, x)
    with attached(model):
        actual = gradients(model, run, x)
    assert [g is None for g in actual] == [g is None for g in expected]
    assert_close(*([g for g in found if g is not None] for found in (actual, expected)))


def test_a_cell_that_is_changed_behind_attach_is_the_one_that_the_engine_goes_by():
    def rectified(model, x):
        model.cell.nonlinearity = "relu"
        loss_of(model(x, initial("rnn_tanh cell"))).backward()

    def normed(model, x):
        torch.nn.utils.parametrizations.weight_norm(model.cell, "weight_hh")
        loss_of(model(x, initial("gru cell"))).backward()

    assert_autograds(made("rnn_tanh cell"), rectified)
    assert_autograds(made("gru cell"), normed)


def test_data_that_is_replaced_between_the_passes_is_not_what_the_gradients_are_taken_at():
    def run(model, x):
        loss = loss_of(model(x, initial("gru cell")))
        model.cell.weight_hh.data = 2 * model.cell.weight_hh.data
        loss.backward()

    assert_autograds(made("gru cell"), run)
    model = made("leaky")
    with attached(model):
        loss = loss_of(model(torch.randn(STEPS, BATCH, INPUT), initial("leaky")))
        model.cell.leak.data = 2 * model.cell.leak.data
        assert "cell has other parameters in the backward pass" in refusal(loss.backward)


@pytest.mark.parametrize("cell", ["gru cell", "leaky"])
def test_taps_on_a_cell_that_come_later_are_refused(cell):
    model, x = made(cell), torch.randn(STEPS, BATCH, INPUT)
    with attached(model):
        hook = model.cell.register_forward_hook(lambda *_: None)
        assert "cell has forward hooks" in refusal(lambda: model(x, initial(cell)))
        hook.remove()
        hook = register_module_forward_hook(lambda *_: None)
        assert "a global hook on all modules" in refusal(lambda: model(x, initial(cell)))
        hook.remove()


def test_gradients_of_states_are_whole_or_refused_whatever_else_is_asked_for():
    def final(model, x):
        out, state = model(x, initial("gru cell"))
        return torch.autograd.grad(loss_of([out, state]), [state, x])

    assert_autograds(made("gru cell"), final)
    for cell in ("lstm cell", "two parts"):
        model = made(cell)
        with attached(model):
            out, (h, c) = model(torch.randn(STEPS, BATCH, INPUT), initial(cell))
            asked = [c, *model.parameters()]
            assert "was asked for its gradient" in refusal(
                lambda a=asked, of=(out, h, c): torch.autograd.grad(loss_of(of), a)
            )
