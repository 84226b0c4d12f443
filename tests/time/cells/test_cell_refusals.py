"""Cells that cannot run on all steps as one batch, or change what they should not, are refused."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from cell_tasks import HIDDEN, INPUT, Leaky, Task, refusal
from oracles import assert_close
from torch import nn

import gradfree
from gradfree import CellLayer


def test_what_cannot_be_supported_is_refused():
    class Outsider(Leaky):
        outside = [torch.ones(HIDDEN, requires_grad=True)]  # noqa: RUF012

        def forward(self, x, state):
            return super().forward(x, state) * self.outside[0]

    engine = gradfree.create_engine("truncated")
    layer, x = CellLayer(Outsider()), torch.randn(5, 2, INPUT)
    with engine.attach(layer):
        out = layer(x)[0].sum()
        assert "cell uses a tensor that needs a gradient" in refusal(out.backward)
    layer = CellLayer(nn.RNNCell(INPUT, HIDDEN))
    assert "at least one step, not (0, 2, 3)" in refusal(lambda: layer(torch.randn(0, 2, INPUT)))
    assert "Linear has no hidden_size: pass the initial state" in refusal(lambda: CellLayer(nn.Linear(3, 4))(x))


def test_highway_bp_wants_a_gate_that_it_knows():
    layer = Task("leaky", 5).layer
    assert "'' has no gate that carries its state" in refusal(
        lambda: gradfree.create_engine("highway_bp").attach(layer)
    )
    gradfree.create_engine("highway_bp", gamma=1).attach(layer).detach()


class Dropping(Leaky):
    def forward(self, x, state):
        return nn.functional.dropout(super().forward(x, state), 0.5)


class Counting(Leaky):
    calls = 0

    def forward(self, x, state):
        self.calls += 1
        return super().forward(x, state) * self.calls


class Mixing(Leaky):
    def forward(self, x, state):
        after = super().forward(x, state)
        return after - after.mean(0)


@pytest.mark.parametrize("cell", [Dropping, Counting, Mixing])
def test_a_cell_that_gives_other_states_when_run_again_is_refused(cell):
    layer = CellLayer(cell())
    with gradfree.create_engine("fixed_point").attach(layer):
        loss = layer(torch.randn(5, 3, INPUT), torch.randn(3, HIDDEN))[0].sum()
        assert "cell gives other states when it runs on all steps as one batch" in refusal(loss.backward)


def longer(task):
    task.layer(task.x.detach()[:1], task.state)[0].sum().backward()


def evaluated(task):
    task.layer.eval()(task.x.detach(), task.state)[0].sum().backward()
    task.layer.train()


def annealed(task):
    task.layer(task.x.detach(), task.state)[0].sum().backward()
    task.layer.cell.rate = 0.5


class Changing(Leaky):
    """Its output depends on what else it holds."""

    def __init__(self, mixes=False):
        super().__init__()
        self.rate, self.masks, self.mixes = 0.0, {"h": torch.ones(HIDDEN)}, mixes

    def forward(self, x, state):
        after = super().forward(x, state * self.masks["h"])
        after = after - after.mean(0) if self.mixes else after
        return nn.functional.dropout(after, self.rate, self.training)


@pytest.mark.parametrize(("change", "options"), [(longer, {"mixes": True}), (evaluated, {}), (annealed, {})])
def test_a_cell_is_compared_again_when_something_of_it_has_changed(change, options):
    """Its mode, a rate; what one step alone did not tell."""
    task = Task("leaky", 5)
    task.layer.cell = Changing(**options)
    if change is evaluated:
        task.layer.cell.rate = 0.5
    with gradfree.create_engine("fixed_point", iterations=5).attach(task.layer):
        change(task)
        assert "gives other states when it runs" in refusal(task.gradients)


def test_a_cell_that_is_changed_between_its_passes_is_refused():
    """As a mask of locked dropout is, drawn for each sequence: the first one's backward pass would use the second's."""
    task = Task("leaky", 5)
    task.layer.cell = Changing()
    expected = task.gradients()
    with gradfree.create_engine("fixed_point", iterations=5).attach(task.layer):
        assert_close(task.gradients(), expected)
        earlier = task.layer(task.x, task.state)[0].sum()
        task.layer.cell.masks["h"] = torch.rand(HIDDEN)
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


class Normalised(Leaky):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(next(m for m in self.modules() if isinstance(m, nn.Linear)))


class Overwriting(Leaky):
    def forward(self, x, state):
        return super().forward(x, state.mul_(0.5))


@pytest.mark.parametrize("cell", [Counted, Replaced, Normalised, Overwriting])
def test_a_cell_that_changes_what_it_is_given_or_holds_is_refused(cell):
    layer = CellLayer(cell())
    with gradfree.create_engine("fixed_point").attach(layer):
        message = refusal(lambda: layer(torch.randn(5, 3, INPUT), torch.randn(3, HIDDEN)))
        assert "cell changes its input, its state, a parameter or a buffer" in message


def test_states_of_whole_numbers_are_refused():
    layer = CellLayer(Leaky())
    state = torch.randn(3, HIDDEN), torch.zeros(3, 1, dtype=torch.long)
    with gradfree.create_engine("fixed_point").attach(layer):
        message = refusal(lambda: layer(torch.randn(5, 3, INPUT), state))
        assert "cell was given a state of torch.float64, torch.int64" in message


def test_hooks_on_a_cell_and_layers_with_a_loop_of_their_own_are_refused():
    class Doubling(CellLayer):
        def unroll(self, x, parts):
            return [2 * part for part in super().unroll(x, parts)]

    engine = gradfree.create_engine("truncated")
    assert "Doubling with another unroll" in refusal(lambda: engine.attach(Doubling(Leaky())))


def test_random_numbers_that_come_late_by_what_the_cell_does_not_hold_itself_are_refused():
    class Noisy(Leaky):
        rates = SimpleNamespace(noise=0.0)

        def forward(self, x, state):
            return nn.functional.dropout(super().forward(x, state), self.rates.noise)

    def loss():
        return model(torch.randn(5, 2, INPUT), torch.zeros(2, HIDDEN))[0].sum()

    model = CellLayer(Noisy())
    with gradfree.create_engine("backprop").attach(model):
        loss().backward()
        Noisy.rates.noise = 0.5
        assert "gives other states when it runs on all steps as one batch" in refusal(lambda: loss().backward())
