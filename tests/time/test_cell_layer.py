"""Any cell as a layer: torch's single-step cells and a user's own."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import gradfree
from gradfree import CellLayer, ChainError

INPUT, HIDDEN = 3, 4


class Leaky(nn.Module):
    """A user's cell with one state: leaky integration of a small network."""

    hidden_size = HIDDEN

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(INPUT + HIDDEN, HIDDEN)
        self.leak = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x, state):
        return self.leak * state + torch.tanh(self.network(torch.cat([x, state], -1)))


class Halving(torch.autograd.Function):
    """Halves its cotangent where it lies, as it may in autograd where nothing else reads it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent.mul_(0.5)


class Writing(Leaky):
    """A user's cell whose state comes out of a function that writes to its cotangent."""

    def forward(self, x, state):
        return Halving.apply(super().forward(x, state))


class TwoParts(Leaky):
    """A user's cell whose state has two parts of different width."""

    def forward(self, x, state):
        h, slow = state
        h = super().forward(x, h) + slow.mean(-1, keepdim=True)
        return h, 0.9 * slow + h[:, :2]


CELLS = {
    "leaky": (Leaky, [HIDDEN]),
    "writing to its cotangent": (Writing, [HIDDEN]),
    "two parts": (TwoParts, [HIDDEN, 2]),
    "rnn_tanh": (lambda: nn.RNNCell(INPUT, HIDDEN), [HIDDEN]),
    "rnn_relu": (lambda: nn.RNNCell(INPUT, HIDDEN, nonlinearity="relu"), [HIDDEN]),
    "gru": (lambda: nn.GRUCell(INPUT, HIDDEN), [HIDDEN]),
    "gru without bias": (lambda: nn.GRUCell(INPUT, HIDDEN, bias=False), [HIDDEN]),
    "lstm": (lambda: nn.LSTMCell(INPUT, HIDDEN), [HIDDEN, HIDDEN]),
}


class Task:
    """A layer with an input and an initial state, and a loss on all it returns."""

    def __init__(self, cell, length, batch_first=False):
        make, widths = CELLS[cell]
        self.layer = CellLayer(make(), batch_first)
        self.x = torch.randn(length, 5, INPUT)
        self.x = (self.x.transpose(0, 1) if batch_first else self.x).requires_grad_()
        parts = tuple(torch.randn(5, width, requires_grad=True) for width in widths)
        self.state = parts if len(parts) > 1 else parts[0]

    def run(self):
        out, final = self.layer(self.x, self.state)
        return [out, *(final if isinstance(final, tuple) else [final])]

    def gradients(self):
        generator = torch.Generator(torch.get_default_device()).manual_seed(1)
        loss = sum((o * torch.randn(o.shape, generator=generator)).sum() for o in self.run())
        state = self.state if isinstance(self.state, tuple) else [self.state]
        return torch.autograd.grad(loss, [self.x, *state, *self.layer.parameters()])


def exact(cell, length):
    yield gradfree.create_engine("backprop")
    yield gradfree.create_engine("deeppcr")
    yield gradfree.create_engine("fixed_point", iterations=length)
    yield gradfree.create_engine("truncated", window=length)
    yield gradfree.create_engine("dsf", feedback=0.7, iterations=length)
    if cell.startswith(("gru", "lstm")):
        yield gradfree.create_engine("highway_bp", iterations=length)
        yield gradfree.create_engine("dsf", feedback="gate", iterations=length)


def assert_close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10 * e.abs().max().item())


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


def refusal(call):
    with pytest.raises((ChainError, ValueError)) as error:
        call()
    return str(error.value)


def test_what_cannot_be_supported_is_refused():
    class Dropping(Leaky):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

    class Outsider(Leaky):
        outside = [torch.ones(HIDDEN, requires_grad=True)]  # noqa: RUF012

        def forward(self, x, state):
            return super().forward(x, state) * self.outside[0]

    engine = gradfree.create_engine("truncated")
    layer = CellLayer(Dropping())
    assert "cell.dropout is a Dropout: an engine runs the cell again" in refusal(lambda: engine.attach(layer))
    layer = CellLayer(Leaky())
    with engine.attach(layer):
        assert "has an engine attached already" in refusal(lambda: engine.attach(layer))
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


def test_a_hook_on_a_known_cell_that_comes_later_is_part_of_it():
    task = Task("gru", 5)
    with gradfree.create_engine("fixed_point", iterations=5).attach(task.layer):
        hook = task.layer.cell.register_forward_hook(lambda module, args, out: 0.5 * out)
        actual = task.gradients()
    assert_close(actual, task.gradients())
    hook.remove()


def test_hooks_on_a_cell_and_layers_with_a_loop_of_their_own_are_refused():
    class Doubling(CellLayer):
        def unroll(self, x, parts):
            return [2 * part for part in super().unroll(x, parts)]

    engine = gradfree.create_engine("truncated")
    assert "Doubling with an unroll of its own" in refusal(lambda: engine.attach(Doubling(Leaky())))
    layer = CellLayer(Leaky())
    layer.cell.network.register_forward_hook(lambda module, args, out: None)
    assert "cell.network has hooks" in refusal(lambda: engine.attach(layer))
