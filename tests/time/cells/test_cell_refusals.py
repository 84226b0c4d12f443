"""Cells that cannot run on all steps as one batch, or that change their inputs or buffers, are refused."""

import pickle
import warnings
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from cell_tasks import HIDDEN, INPUT, Leaky, Task, refusal
from oracles import assert_close
from recomputing import RecomputedCell
from torch import nn

import gradfree
from gradfree import CellLayer
from gradfree.models.para_rnn import ParaGRUCell

LINEARISING = ("fixed_point", "truncated", "deeppcr")


class Undeclared(nn.Module):
    hidden_size = HIDDEN

    def forward(self, x, state):
        return x, state


class Wrong(Undeclared):
    output_size = 4

    def forward(self, x, state):
        return state


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (lambda: nn.RNNCell(INPUT + 1, HIDDEN), "at least one step, not (0, 2, 3)"),
        (lambda: nn.Linear(3, 4), "Linear has no hidden_size: pass the initial state"),
        (Undeclared, "set Undeclared.output_size"),
        (Wrong, "did not return (out, state)"),
    ],
)
def test_bad_cells_and_inputs_are_refused_without_an_engine_too(cell, message):
    x = torch.randn(0 if "step" in message else 5, 2, INPUT)
    assert message in refusal(lambda: CellLayer(cell())(x))


class Outsider(Leaky):
    outside = [torch.ones(HIDDEN, requires_grad=True)]  # noqa: RUF012

    def forward(self, x, state):
        return super().forward(x, state) * self.outside[0].to(x.device)


class Dropping(Leaky):
    rates = SimpleNamespace(noise=0.5)

    def forward(self, x, state):
        return nn.functional.dropout(super().forward(x, state), self.rates.noise)


class Counting(Leaky):
    calls = 0

    def forward(self, x, state):
        self.calls += 1
        return super().forward(x, state) * self.calls


class Mixing(Leaky):
    def forward(self, x, state):
        after = super().forward(x, state)
        return after - after.mean(0)


OTHER_STATES = "cell gives other states when it runs on all steps as one batch"


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (Dropping, OTHER_STATES),
        (Counting, OTHER_STATES),
        (Mixing, OTHER_STATES),
        (Outsider, "cell uses a tensor that needs a gradient"),
    ],
)
def test_a_cell_that_cannot_be_run_again_is_refused(cell, message):
    layer = CellLayer(cell())
    with gradfree.create_engine("fixed_point").attach(layer):
        assert "a row for each of" in refusal(lambda: layer(torch.randn(5, 3, INPUT), torch.randn(1, HIDDEN)))
        x, state = torch.randn(5, 3, INPUT), torch.randn(3, HIDDEN)
        assert message in refusal(lambda: layer(x, state)[0].sum().backward())


class Beginning(Leaky):
    """Its first step is another one; set ``steps`` to 0 before a sequence."""

    steps = 0

    def forward(self, x, state):
        self.steps += 1
        return super().forward(x, state) * (2.0 if self.steps == 1 else 0.5)


class BeginningByUnits(ParaGRUCell):
    steps = 0

    def advance(self, fed, state):
        self.steps += 1
        return tuple(part * (2.0 if self.steps == 1 else 0.5) for part in super().advance(fed, state))


@pytest.mark.parametrize(
    ("make", "name", "options"),
    [
        *((Beginning, name, {}) for name in ("fixed_point", "dsf", "truncated", "deeppcr", "rtrl")),
        (lambda: BeginningByUnits(INPUT, HIDDEN, None), "fixed_point", {}),
        (lambda: BeginningByUnits(INPUT, HIDDEN, None), "newton", {"max_sweeps": 9}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*hides the gate")
def test_a_cell_whose_first_step_is_another_one_is_refused(make, name, options):
    """No run of the cell may take the first step before the loop does."""
    layer, x = CellLayer(make()), torch.randn(7, 2, INPUT)
    expected = layer(x)[0]
    layer.cell.steps = 0
    with gradfree.create_engine(name, **options).attach(layer):
        if name != "newton":
            assert torch.equal(layer(x)[0], expected)
            layer.cell.steps = 0
        assert OTHER_STATES in refusal(lambda: layer(x)[0].sum().backward())


class Attending(Leaky):
    """Its context has a row for each sequence."""

    def __init__(self):
        super().__init__()
        self.context = torch.ones(3, 2, HIDDEN)

    def forward(self, x, state):
        return super().forward(x, state + torch.bmm(self.context, state.unsqueeze(-1)).mean(1))


def test_a_cell_that_raises_on_all_steps_is_refused_by_name():
    layer = CellLayer(Attending())
    with gradfree.create_engine("fixed_point").attach(layer):
        loss = layer(torch.randn(5, 3, INPUT))[0].sum()
        assert refusal(loss.backward).startswith("cell raises an error (Expected size for first two dimensions")


@pytest.mark.parametrize("name", ["backprop", "shooting", "truncated"])
def test_a_frozen_cell_gets_autograds_gradient_of_a_tensor_that_is_no_parameter(name):
    layer, (outside,), x = CellLayer(Outsider()).requires_grad_(False), Outsider.outside, torch.randn(5, 3, INPUT)
    expected = torch.autograd.grad(layer(x)[0].square().sum(), outside)
    with gradfree.create_engine(name).attach(layer):
        assert_close(torch.autograd.grad(layer(x)[0].square().sum(), outside), expected)


@pytest.mark.parametrize("name", [*LINEARISING, "dsf", "rtrl", "snap"])
@pytest.mark.filterwarnings("ignore:.*hides the gate")
def test_a_function_that_computes_the_gradients_of_parameters_by_itself_is_refused(name):
    layer = CellLayer(RecomputedCell(INPUT, HIDDEN))
    with gradfree.create_engine(name).attach(layer):
        message = refusal(lambda: layer(torch.randn(5, 2, INPUT))[0].sum().backward())
    assert "function Recomputed, and its graph does not lead to the parameter 'weight_ih'" in message
    assert all(p.grad is None for p in layer.parameters())


def test_dropout_that_starts_late_by_a_global_rate_is_refused():
    model, Dropping.rates.noise = CellLayer(Dropping()), 0.0
    with gradfree.create_engine("fixed_point").attach(model):
        model(torch.randn(5, 2, INPUT))[0].sum().backward()
        Dropping.rates.noise = 0.5
        assert OTHER_STATES in refusal(lambda: model(torch.randn(5, 2, INPUT))[0].sum().backward())


class Changing(Leaky):
    """Its output depends on a rate and on a mask."""

    def __init__(self):
        super().__init__()
        self.rate, self.masks = 0.0, UserDict({0: torch.ones(HIDDEN)})

    def forward(self, x, state):
        after = super().forward(x, state * self.masks[0])
        return nn.functional.dropout(after, self.rate, self.training)


def test_a_cell_is_compared_in_every_pass():
    task = Task("leaky", 5)
    task.layer.cell = Changing()
    with gradfree.create_engine("fixed_point", iterations=5).attach(task.layer):
        task.gradients()
        task.layer.cell.rate = 0.5
        assert "gives other states when it runs" in refusal(task.gradients)


def test_a_cell_that_is_changed_between_its_passes_is_refused():
    """Example: locked dropout draws a mask for each sequence; an earlier backward pass would use the later mask."""
    task = Task("leaky", 5)
    task.layer.cell = Changing()
    expected = task.gradients()
    with gradfree.create_engine("fixed_point", iterations=5).attach(task.layer):
        assert_close(task.gradients(), expected)
        earlier = task.layer(task.x, task.state)[0].sum()
        task.layer.cell.masks[0] = torch.rand(HIDDEN)
        task.gradients()
        assert "not changed between the forward and the backward pass" in refusal(earlier.backward)
        copied = pickle.loads(pickle.dumps(task.layer))
        copied(task.x, task.state)[0].sum().backward()


class Counted(Leaky):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, state):
        self.steps += 1
        return super().forward(x, state)


class Replaced(Counted):
    def forward(self, x, state):
        self.steps = self.steps + 1
        return Leaky.forward(self, x, state)


class Overwriting(Leaky):
    def forward(self, x, state):
        return super().forward(x, state.mul_(0.5))


class Keeping(Leaky):
    """It changes each state but the first one in place."""

    def forward(self, x, state):
        after = super().forward(x, state)
        if self.last is state:
            with torch.no_grad():
                state.mul_(0.5)
        self.last = after
        return after

    last = None


class Converting(Leaky):
    """Autograd would give the parameters gradients of the earlier dtype."""

    def forward(self, x, state):
        self.float()
        return super().forward(x.float(), state.float()).to(state.dtype)


@pytest.mark.parametrize("cell", [Counted, Replaced, Overwriting, Keeping, Converting])
def test_a_cell_that_changes_its_inputs_or_buffers_is_refused(cell):
    layer = CellLayer(cell())
    with gradfree.create_engine("fixed_point").attach(layer):
        message = refusal(lambda: layer(torch.randn(5, 3, INPUT), torch.randn(3, HIDDEN)))
        assert "cell changes its input, its state, a parameter or a buffer" in message


def hooking(do):
    """Return a cell that does something to its state or input before it runs."""

    class Hooking(Leaky):
        def forward(self, x, state):
            return super().forward(*do(x, state))

    return CellLayer(Hooking())


def clamped(t):
    t.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return t


ON_ARGUMENTS = {
    "a hook on the state": lambda x, h: (x, clamped(h) if h.requires_grad else h),
    "retain_grad()": lambda x, h: (x, (h.requires_grad and h.retain_grad(), h)[1]),
    "a hook on the input": lambda x, h: (clamped(x) if x.requires_grad else x, h),
}


@pytest.mark.parametrize("name", ["backprop", "shooting", "newton"])
@pytest.mark.parametrize("what", ON_ARGUMENTS)
@pytest.mark.filterwarnings("ignore:the cell layer")
def test_hooks_on_what_a_cell_is_given_are_exact_in_its_own_loop(what, name):
    layer, x = hooking(ON_ARGUMENTS[what]), torch.randn(24, 3, INPUT, requires_grad=True)
    expected = torch.autograd.grad(layer(x)[0].square().sum(), [x, *layer.parameters()])
    options = {"shooting": {"segments": 3}, "newton": {"max_sweeps": 9}}.get(name, {})
    with gradfree.create_engine(name, **options).attach(layer):
        assert_close(torch.autograd.grad(layer(x)[0].square().sum(), [x, *layer.parameters()]), expected)


@pytest.mark.parametrize("name", LINEARISING)
@pytest.mark.parametrize("what", ON_ARGUMENTS)
def test_hooks_on_what_a_cell_is_given_are_refused(what, name):
    layer = hooking(ON_ARGUMENTS[what])
    with gradfree.create_engine(name).attach(layer):
        message = refusal(lambda: layer(torch.randn(24, 3, INPUT)))
        assert "cell puts a gradient hook, or retain_grad(), on its state or its input" in message


@pytest.mark.parametrize("name", LINEARISING)
@pytest.mark.parametrize(
    ("do", "where"),
    [
        (lambda x, h: (x, clamped(h)), "its state or its input"),
        (lambda x, h: (x, (h.retain_grad(), h)[1]), "its state or its input"),
        (lambda x, h: (x, clamped(1.0 * h)), "a tensor that needs no gradient"),
    ],
)
def test_hooks_without_a_condition_are_refused_in_the_forward_pass(do, where, name):
    layer = hooking(do)
    with gradfree.create_engine(name).attach(layer):
        message = refusal(lambda: layer(torch.randn(24, 3, INPUT)))
        assert f"hook, or retain_grad(), on {where}" in message


@pytest.mark.parametrize("name", ["backprop", "shooting", "newton"])
def test_a_hook_that_clamps_the_gradient_of_a_copy_of_the_state_is_exact(name):
    """The remedy of the refusal."""
    layer, x = hooking(lambda x, h: (x, clamped(h.view_as(h)) if h.requires_grad else h)), torch.randn(24, 3, INPUT)
    expected = torch.autograd.grad(layer(x)[0].square().sum(), [*layer.parameters()])
    options = {"segments": 3} if name == "shooting" else {}
    with gradfree.create_engine(name, **options).attach(layer):
        assert_close(torch.autograd.grad(layer(x)[0].square().sum(), [*layer.parameters()]), expected)


def test_cell_layers_with_another_unroll_are_refused():
    class Doubling(CellLayer):
        def unroll(self, x, parts):
            return [2 * part for part in super().unroll(x, parts)]

    engine = gradfree.create_engine("truncated")
    assert "Doubling with another unroll" in refusal(lambda: engine.attach(Doubling(Leaky())))


class Wrapping(nn.Module):
    hidden_size = HIDDEN

    def __init__(self):
        super().__init__()
        self.inner = nn.GRUCell(INPUT, HIDDEN)

    def forward(self, x, state):
        return self.inner(x, state)


HIDDEN_GATES = {
    "GRU": (lambda: nn.GRUCell(INPUT, HIDDEN), "hides the gate of GRUCell. Use nn.GRU and layer.load_state_dict"),
    "LSTM": (lambda: nn.LSTMCell(INPUT, HIDDEN), "hides the gate of LSTMCell. Use nn.LSTM and layer.load_state_dict"),
    "wrapped": (Wrapping, "hides the gate of GRUCell. Write it as a gradfree.ElementwiseCell"),
    "none": (Leaky, "has no gate that carries its state"),
}


@pytest.mark.parametrize("cell", HIDDEN_GATES)
def test_rules_on_gates_name_the_remedy_for_a_cell_that_hides_its_gate(cell):
    make, said = HIDDEN_GATES[cell]
    layer = CellLayer(make())
    for name, options in (("highway_bp", {}), ("dsf", {"feedback": "gate"}), ("newton", {"jacobian": "gate"})):
        assert said in refusal(lambda n=name, o=options: gradfree.create_engine(n, **o).attach(layer))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        gradfree.create_engine("dsf").attach(layer).detach()
        gradfree.create_engine("dsf", feedback="linspace").attach(layer).detach()
    assert [said in str(warning.message) for warning in given] == ([] if cell == "none" else [True])


def test_a_layer_is_no_cell():
    with pytest.raises(TypeError, match=r"CellLayer takes a cell, such as nn.GRUCell\. GRU is a layer"):
        CellLayer(nn.GRU(3, 3))
