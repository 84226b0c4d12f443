"""Any cell as a layer: torch's single-step cells and a user's own."""

import copy

import pytest
import torch
from cell_tasks import CELLS, HIDDEN, INPUT, Task, refusal
from oracles import assert_close
from torch import nn
from torch.nn.utils import prune

import gradfree
from gradfree import CellLayer


def exact(cell, length):
    yield gradfree.create_engine("backprop")
    yield gradfree.create_engine("deeppcr")
    yield gradfree.create_engine("fixed_point", iterations=length)
    yield gradfree.create_engine("truncated", window=length)
    yield gradfree.create_engine("dsf", feedback=0.7, iterations=length)
    if cell.startswith(("gru", "lstm", "para")):
        yield gradfree.create_engine("highway_bp", iterations=length)
        yield gradfree.create_engine("dsf", feedback="gate", iterations=length)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_equal_bptt_and_outputs_are_bitwise_the_same(cell, length, batch_first):
    task = Task(cell, length, batch_first)
    outputs, expected = task.run(), task.gradients()
    for engine in exact(cell, length):
        with engine.attach(task.layer):
            assert all(map(torch.equal, task.run(), outputs))
            assert_close(task.gradients(), expected)


@pytest.mark.parametrize("cell", ["leaky", "two parts"])
def test_window_1_trains_each_step_on_its_own_loss_alone(cell):
    task = Task(cell, 7)
    parts = task.state if isinstance(task.state, tuple) else (task.state,)
    weight, total = torch.randn(7, 5, HIDDEN), 0.0
    for t in range(7):
        after = task.layer.cell(task.x[t].detach(), parts if len(parts) > 1 else parts[0])
        parts = after if isinstance(after, tuple) else (after,)
        total = total + (parts[0] * weight[t]).sum()
        parts = tuple(part.detach() for part in parts)
    expected = torch.autograd.grad(total, list(task.layer.parameters()), allow_unused=True)
    with gradfree.create_engine("truncated").attach(task.layer):
        actual = torch.autograd.grad((task.run()[0] * weight).sum(), list(task.layer.parameters()))
    assert_close(actual, expected)


def test_it_equals_torchs_fused_layer_with_zeros_to_start_from():
    fused, layer, x = nn.LSTM(INPUT, HIDDEN), CellLayer(nn.LSTMCell(INPUT, HIDDEN)), torch.randn(7, 5, INPUT)
    layer.cell.load_state_dict({k.removesuffix("_l0"): v for k, v in fused.state_dict().items()})
    out, (h, c) = layer(x)
    expected, finals = fused(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close((h.unsqueeze(0), c.unsqueeze(0)), finals)


def test_frozen_parameters_and_inputs_without_gradient():
    for cell in ("leaky", "gru"):
        task = Task(cell, 5)
        next(task.layer.parameters()).requires_grad_(False)
        trained = [p for p in task.layer.parameters() if p.requires_grad]
        task.x.requires_grad_(False)
        expected = torch.autograd.grad(task.run()[0].sum(), trained)
        with gradfree.create_engine("backprop").attach(task.layer):
            assert_close(torch.autograd.grad(task.run()[0].sum(), trained), expected)


def test_attach_and_detach_leave_no_trace_and_copies_are_independent():
    task = Task("leaky", 5)
    before = set(vars(task.layer))
    with gradfree.create_engine("truncated").attach(task.layer):
        expected = task.gradients()
        other = copy.deepcopy(task)
        assert other.layer.unroll.__self__.layer is other.layer
    assert set(vars(task.layer)) == before
    assert_close(other.gradients(), expected)
    assert not torch.allclose(task.gradients()[0], expected[0])


def test_a_model_with_such_a_layer_is_found():
    model = nn.Sequential(nn.Linear(INPUT, INPUT), CellLayer(nn.GRUCell(INPUT, HIDDEN)))
    assert str(gradfree.create_engine("dsf").validate(model)) == "chain '1': a layer of GRUCell, in time"


def pruned_gru():
    cell = nn.GRUCell(INPUT, HIDDEN, bias=False)
    prune.l1_unstructured(cell, "weight_hh", 0.5)
    return cell


def scaled_gru():
    cell = nn.GRUCell(INPUT, HIDDEN)
    nn.utils.parametrize.register_parametrization(cell, "weight_hh", nn.Softplus())
    return cell


def clamped_gru():
    cell = nn.GRUCell(INPUT, HIDDEN)
    cell.forward = lambda x, h: nn.GRUCell.forward(cell, x, h).clamp(-0.1, 0.1)
    return cell


@pytest.mark.parametrize("make", [pruned_gru, scaled_gru, clamped_gru])
def test_torchs_cells_are_taken_in_closed_form_only_as_torch_made_them(make):
    task = Task("gru", 7)
    task.layer.cell = make()
    expected = task.gradients()
    for engine in (gradfree.create_engine("backprop"), gradfree.create_engine("fixed_point", iterations=7)):
        with engine.attach(task.layer):
            assert_close(task.gradients(), expected)


def test_autocast_is_that_of_the_forward_pass():
    task = Task("leaky", 7)
    layer, x, state = task.layer.float(), task.x.detach().float(), task.state.detach().float()

    def gradients():
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x, state)[0]
        return torch.autograd.grad(out.float().sum(), list(layer.parameters()))

    expected = gradients()
    with gradfree.create_engine("backprop").attach(layer):
        for a, e in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(a, e, rtol=0.02, atol=0.02 * e.abs().max().item())


@pytest.mark.parametrize("cell", ["gru", "leaky"])
@pytest.mark.parametrize("before", [True, False])
def test_freezing_between_the_forward_and_the_backward_pass(cell, before):
    task = Task(cell, 5)

    def gradients():
        task.layer.zero_grad()
        weight = next(task.layer.parameters()).requires_grad_(before)
        loss = task.layer(task.x, task.state)[0].pow(2).sum()
        weight.requires_grad_(not before)
        loss.backward()
        return [p.grad for p in task.layer.parameters()]

    expected = gradients()
    with gradfree.create_engine("fixed_point", iterations=5).attach(task.layer):
        actual = gradients()
    assert [g is None for g in actual] == [g is None for g in expected]
    assert_close([g for g in actual if g is not None], [g for g in expected if g is not None])


@pytest.mark.parametrize("cell", ["gru", "leaky"])
def test_hooks_on_parameters_run_once(cell):
    task = Task(cell, 5)
    expected = task.gradients()
    hooks = [p.register_hook(lambda grad: 3 * grad) for p in task.layer.parameters()]
    with gradfree.create_engine("fixed_point", iterations=5).attach(task.layer):
        actual = task.gradients()
    assert_close(actual[-len(hooks) :], [3 * g for g in expected[-len(hooks) :]])


def test_parameters_from_outside():
    """With closed forms their gradients; a cell of one's own runs again when they are gone, and is refused."""
    for cell in ("gru", "leaky"):
        task = Task(cell, 5)
        given = {name: (1.5 * p.detach()).requires_grad_() for name, p in task.layer.named_parameters()}

        def gradients(task=task, given=given):
            out = torch.func.functional_call(task.layer, given, (task.x, task.state))[0]
            return torch.autograd.grad(out.pow(2).sum(), list(given.values()))

        expected = gradients()
        with gradfree.create_engine("fixed_point", iterations=5).attach(task.layer):
            if cell == "gru":
                assert_close(gradients(), expected)
            else:
                assert "cell has other parameters in the backward pass" in refusal(gradients)


def test_a_hook_before_a_known_cell_that_comes_later_is_part_of_it():
    task = Task("gru", 5)
    with gradfree.create_engine("fixed_point", iterations=5).attach(task.layer):
        hook = task.layer.cell.register_forward_pre_hook(lambda module, args: (0.5 * args[0], args[1]))
        actual = task.gradients()
    assert_close(actual, task.gradients())
    hook.remove()
