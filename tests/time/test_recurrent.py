"""Chains in time: torch's own recurrent modules, unmodified."""

import copy

import pytest
import torch
from pairwise import pairwise
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree import ChainError
from gradfree.time.gru_forward import pays

CELLS = {
    "rnn_tanh": lambda *a, **k: nn.RNN(*a, **k),
    "rnn_relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "gru": lambda *a, **k: nn.GRU(*a, **k),
    "lstm": lambda *a, **k: nn.LSTM(*a, **k),
}
LAYOUTS = {
    "one layer": {},
    "no bias": {"options": {"bias": False}},
    "three layers, batch first, h0": {"options": {"num_layers": 3, "batch_first": True}, "h0": True},
    "bidirectional, h0": {"options": {"num_layers": 2, "bidirectional": True}, "h0": True},
    "packed": {"packed": True},
    "packed, bidirectional, batch first, h0": {
        "options": {"num_layers": 2, "bidirectional": True, "batch_first": True},
        "packed": True,
        "h0": True,
    },
    "no batch, h0": {"options": {"num_layers": 2, "bidirectional": True}, "batch": None, "h0": True},
    "a batch of one": {"batch": 1},
}
INPUT, HIDDEN = 3, 4


class Task:
    """A recurrent module with an input, and a loss on all its outputs and final states."""

    def __init__(self, cell, length, options=None, batch=5, packed=False, h0=False):
        options = options or {}
        self.module = CELLS[cell](INPUT, HIDDEN, **options)
        shape = (length,) if batch is None else (length, batch)
        self.x = torch.randn(*shape, INPUT)
        if options.get("batch_first") and batch is not None:
            self.x = self.x.transpose(0, 1).contiguous()
        self.x.requires_grad_()
        self.lengths = (
            torch.tensor([max(1, length - 2), length, 1, max(1, length // 2), length], device="cpu") if packed else None
        )
        layers = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
        shape = (layers, HIDDEN) if batch is None else (layers, batch, HIDDEN)
        self.states = [torch.randn(shape, requires_grad=True) for _ in range(2 if cell == "lstm" else 1)] if h0 else []

    def run(self):
        """Return the outputs and the final states as a flat list."""
        x = self.x
        if self.lengths is not None:
            first = self.module.batch_first
            x = pack_padded_sequence(x, self.lengths, batch_first=first, enforce_sorted=False)
        hx = None if not self.states else tuple(self.states) if len(self.states) > 1 else self.states[0]
        out, final = self.module(x, hx)
        return [out if self.lengths is None else out.data, *(final if isinstance(final, tuple) else [final])]

    def gradients(self, weights=None):
        """Return the gradients of input, initial states and parameters for random weights of what run() returns."""
        outputs = self.run()
        weights = weights or [
            torch.randn(o.shape, generator=torch.Generator(self.x.device).manual_seed(1)) for o in outputs
        ]
        loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
        return torch.autograd.grad(loss, [self.x, *self.states, *self.module.parameters()])


def exact(cell, length):
    """Return engines that are exact on ``length`` steps."""
    yield gradfree.create_engine("backprop")
    yield gradfree.create_engine("deeppcr")
    yield gradfree.create_engine("fixed_point", iterations=length)
    yield gradfree.create_engine("truncated", window=length)
    for feedback in ("linspace", 0.7, torch.rand(HIDDEN)):
        yield gradfree.create_engine("dsf", iterations=length, feedback=feedback)
    if not cell.startswith("rnn"):
        yield gradfree.create_engine("dsf", iterations=length, feedback="gate")
        yield gradfree.create_engine("highway_bp", iterations=length)
        yield gradfree.create_engine("highway_bp", iterations=length, gamma=0.3)
        yield gradfree.create_engine("highway_bp", iterations=length, block=True)
        yield gradfree.create_engine("highway_bp", iterations=length, gamma=0.3, block=True)


def assert_close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10 * e.abs().max().item())


@pairwise(cell=CELLS, layout=LAYOUTS, length=[1, 2, 7, 33])
def test_gradients_equal_bptt_and_outputs_are_bitwise_the_same(cell, layout, length):
    task = Task(cell, length, **LAYOUTS[layout])
    outputs, expected = task.run(), task.gradients()
    for engine in exact(cell, length):
        with engine.attach(task.module):
            assert all(map(torch.equal, task.run(), outputs))
            assert_close(task.gradients(), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("batch", "length", "width"), [(32, 5, 128), (64, 3, 64), (9, 7, 256), (300, 1, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gru_that_keeps_its_gates_is_bitwise_torchs_own(dtype, batch, length, width, bias, device):
    """Large steps take another forward than small ones; exactness is that of float64 in both."""
    if device != "cpu":
        pytest.skip("on the CPU alone: oneDNN's bits")
    module = nn.GRU(width, width, bias=bias).to(dtype)
    x = torch.randn(length, batch, width, dtype=dtype, requires_grad=True)
    h0 = torch.randn(1, batch, width, dtype=dtype, requires_grad=True)
    assert pays(x, width)

    def gradients():
        out, final = module(x, h0)
        loss = (out.sin() * out).sum() + final.pow(2).sum()
        return out, final, torch.autograd.grad(loss, [x, h0, *module.parameters()])

    expected = gradients()
    with gradfree.create_engine("backprop").attach(module):
        actual = gradients()
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    if dtype == torch.float64:
        assert_close(actual[2], expected[2])


@pytest.mark.parametrize("cell", CELLS)
def test_a_loss_on_some_steps_or_the_final_state_alone(cell):
    task = Task(cell, 7)
    outputs = task.run()
    for used in range(len(outputs)):
        weights = [torch.zeros_like(o) for o in outputs]
        weights[used][-1] = 1.0
        expected = task.gradients(weights)
        for engine in exact(cell, 7):
            with engine.attach(task.module):
                actual = torch.autograd.grad(task.run()[used][-1].sum(), [task.x, *task.module.parameters()])
            assert_close(actual, expected)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("cell", ["gru", "lstm", "rnn_tanh"])
def test_truncated_equals_a_graph_cut_by_hand(cell, window):
    """The loss of step t reaches back over ``window`` steps; w = 1 is fully truncated BPTT."""
    task, length = Task(cell, 7), 7
    weight = torch.randn(length, 5, HIDDEN)
    parameters = list(task.module.parameters())
    with torch.no_grad():
        states = [None]
        for t in range(length):
            states.append(task.module(task.x[t : t + 1], states[-1])[1])
    total = 0.0
    for t in range(length):
        first = max(0, t + 1 - window)
        total = total + (task.module(task.x[first : t + 1], states[first])[0][-1] * weight[t]).sum()
    expected = torch.autograd.grad(total, [task.x, *parameters])
    with gradfree.create_engine("truncated", window=window).attach(task.module):
        actual = torch.autograd.grad((task.run()[0] * weight).sum(), [task.x, *parameters])
    assert_close(actual, expected)


def test_dsf_is_exact_where_the_jacobian_is_its_diagonal():
    """A ReLU RNN with diagonal, positive weights and inputs is linear with Jacobian diag(W_hh)."""
    module, a = nn.RNN(INPUT, HIDDEN, nonlinearity="relu"), torch.linspace(0, 1, HIDDEN)
    with torch.no_grad():
        module.weight_hh_l0.copy_(torch.diag(a))
        for parameter in (module.weight_ih_l0, module.bias_ih_l0, module.bias_hh_l0):
            parameter.abs_()
    x, weight = torch.rand(33, 5, INPUT, requires_grad=True), torch.randn(33, 5, HIDDEN)

    def gradients():
        return torch.autograd.grad((module(x)[0] * weight).sum(), [x, *module.parameters()])

    expected = gradients()
    for feedback in ("linspace", a):
        with gradfree.create_engine("dsf", feedback=feedback).attach(module):
            assert_close(gradients(), expected)
    with gradfree.create_engine("dsf", feedback=0.5).attach(module), pytest.raises(AssertionError):
        assert_close(gradients(), expected)


def test_highway_bp_uses_the_update_gate_and_dsf_gate_its_mean():
    """At k = 0: δ_t = e_t + z_{t+1} δ_{t+1}, against a loop with the gate from torch's own cell equations."""
    task, length = Task("gru", 9), 9
    module, x = task.module, task.x.detach()
    with torch.no_grad():
        out = module(x)[0]
        before = torch.cat([torch.zeros(1, 5, HIDDEN), out[:-1]])
        part = slice(HIDDEN, 2 * HIDDEN)
        z = torch.sigmoid(
            (x @ module.weight_ih_l0.t() + module.bias_ih_l0 + before @ module.weight_hh_l0.t() + module.bias_hh_l0)[
                ..., part
            ]
        )
    e = torch.randn(length, 5, HIDDEN)
    for engine, carry in (
        (gradfree.create_engine("highway_bp", iterations=0), z),
        (gradfree.create_engine("highway_bp", iterations=0, gamma=0.25), 0.75 * z),
        (gradfree.create_engine("dsf", feedback="gate"), z.mean((0, 1)).expand_as(z)),
    ):
        delta = e.clone()
        for t in reversed(range(length - 1)):
            delta[t] += carry[t + 1] * delta[t + 1]
        cell = nn.GRUCell(INPUT, HIDDEN)
        cell.load_state_dict({k.removesuffix("_l0"): v for k, v in module.state_dict().items()})
        states = cell(x.flatten(0, 1), before.flatten(0, 1))
        expected = torch.autograd.grad((states * delta.flatten(0, 1)).sum(), list(cell.parameters()))
        with engine.attach(module):
            actual = torch.autograd.grad((task.run()[0] * e).sum(), list(module.parameters()))
        assert_close(actual, expected)


def test_the_block_of_an_lstm_carries_memory_at_k_0():
    """Against a loop: δ of c gets δ of h times o(1 - tanh²c) f from the step behind, and f δ of c."""
    task = Task("lstm", 9)
    cell, x, e = nn.LSTMCell(INPUT, HIDDEN), task.x.detach(), torch.randn(9, 5, HIDDEN)
    cell.load_state_dict({k.removesuffix("_l0"): v for k, v in task.module.state_dict().items()})
    h, c, states = torch.zeros(5, HIDDEN), torch.zeros(5, HIDDEN), []
    for step in x:
        before = (h, c)
        h, c = cell(step, before)
        states.append((before, (h.detach(), c.detach())))
        h, c = h.detach(), c.detach()
    delta_c, total = torch.zeros(5, HIDDEN), [torch.zeros_like(p) for p in cell.parameters()]
    for t in reversed(range(9)):
        before = [part.detach().requires_grad_() for part in states[t][0]]
        h, c = cell(x[t], before)
        for n, g in enumerate(torch.autograd.grad((h, c), list(cell.parameters()), (e[t], delta_c), retain_graph=True)):
            total[n] += g
        # The gates depend on h before alone: what reaches c before is the elementwise path.
        delta_c = torch.autograd.grad((h, c), before[1], (e[t], delta_c))[0]
    with gradfree.create_engine("highway_bp", iterations=0, block=True).attach(task.module):
        actual = torch.autograd.grad((task.run()[0] * e).sum(), list(task.module.parameters()))
    assert_close(actual, total)


def test_dsf_keeps_a_running_mean_of_the_gate_in_checkpoints():
    task = Task("gru", 9, options={"num_layers": 2})
    engine = gradfree.create_engine("dsf", feedback="gate")
    with engine.attach(task.module) as handle:
        assert handle.state_dict() == {}
        first = task.gradients()
        assert sorted(handle.state_dict()[""]) == ["mean of 0.0.0", "mean of 1.0.0"]
        kept = {path: dict(values) for path, values in handle.state_dict().items()}
        task.x = torch.randn_like(task.x, requires_grad=True)
        second = task.gradients()
    with engine.attach(task.module) as handle:
        forgetful = task.gradients()
    with engine.attach(task.module) as handle:
        handle.load_state_dict(kept)
        assert_close(task.gradients(), second)
        with pytest.raises(ValueError, match=r"no chains \['x'\] here; there are \[''\]"):
            handle.load_state_dict({"x": {}})
    assert not torch.allclose(forgetful[1], second[1])
    assert len(first) == len(second)


class LanguageModel(nn.Module):
    """A user's model: embedding, recurrent module with dropout between its layers, head."""

    def __init__(self, cell="gru", dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(11, INPUT)
        self.rnn = CELLS[cell](INPUT, HIDDEN, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(HIDDEN, 11)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])


def train(model, engine=None, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    if engine is not None:
        optimizer = gradfree.EngineOptimizer(optimizer, model, engine)
    torch.manual_seed(5)
    for _ in range(steps):
        tokens = torch.randint(11, (4, 9))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    if engine is not None:
        optimizer.detach()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_unmodified_model_is_found_and_trains_as_with_bptt(cell, dropout):
    model = LanguageModel(cell, dropout)
    other = copy.deepcopy(model)
    engine = gradfree.create_engine("backprop")
    assert str(engine.validate(model)).startswith("chain 'rnn': ")
    for a, b in zip(train(other, engine), train(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_of_a_stack_of_blocks_with_recurrent_layers_the_layers_are_the_chains():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x):
            return x + self.out(self.rnn(x)[0])

    model, x = nn.Sequential(Block(), Block(), Block()), torch.randn(7, 5, HIDDEN)
    engine = gradfree.create_engine("highway_bp", iterations=7)
    assert list(engine.validate(model).chains) == ["0.rnn", "1.rnn", "2.rnn"]
    expected = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
    for chains in (None, [""]):
        with engine.attach(model, chains):
            assert_close(torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters())), expected)


@pytest.mark.parametrize("name", gradfree.list_engines())
def test_every_engine_trains_every_parameter_and_is_linear_in_the_loss(name):
    model, engine = LanguageModel(), gradfree.create_engine(name)
    if not engine.validate(model).ok:
        pytest.skip("not for chains in time")
    tokens = torch.randint(11, (4, 9))
    grads = {}
    for scale in (1e-4, 1.0, 65536.0):
        with engine.attach(model):
            model.zero_grad()
            (scale * model(tokens).pow(2).sum()).backward()
        grads[scale] = torch.cat([p.grad.flatten() / scale for p in model.parameters()])
    assert grads[1.0].isfinite().all()
    for scale in (1e-4, 65536.0):
        torch.testing.assert_close(grads[scale], grads[1.0], rtol=1e-10, atol=1e-12)


def test_frozen_weights_get_no_gradient_and_the_rest_is_exact():
    task = Task("gru", 7)
    task.module.weight_hh_l0.requires_grad_(False)
    names = ["weight_ih_l0", "bias_ih_l0", "bias_hh_l0"]
    parameters = [getattr(task.module, name) for name in names]
    expected = torch.autograd.grad(task.run()[0].pow(2).sum(), parameters)
    with gradfree.create_engine("backprop").attach(task.module):
        loss = task.run()[0].pow(2).sum()
        assert_close(torch.autograd.grad(loss, parameters, retain_graph=True), expected)
        loss.backward()
    assert task.module.weight_hh_l0.grad is None


def test_attach_and_detach_leave_no_trace_and_copies_are_independent():
    model, tokens = LanguageModel(), torch.randint(11, (4, 9))
    before, keys = set(vars(model.rnn)), list(model.state_dict())
    with gradfree.create_engine("truncated").attach(model):
        assert list(model.state_dict()) == keys
        expected = torch.autograd.grad(model(tokens).sum(), model.embedding.weight)
        other = copy.deepcopy(model)
        assert other.rnn.forward.__self__.module is other.rnn
        assert_close(torch.autograd.grad(other(tokens).sum(), other.embedding.weight), expected)
    assert set(vars(model.rnn)) == before


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast(cell, dtype):
    for width, batch in ((HIDDEN, 4), (128, 32)):
        module = CELLS[cell](width, width, num_layers=2).float()
        x = torch.randn(9, batch, width, dtype=torch.float32)

        def gradients(module=module, x=x):
            with torch.autocast("cpu", dtype):
                out = module(x)[0]
            return torch.autograd.grad(out.float().pow(2).sum(), list(module.parameters()))

        expected = gradients()
        with gradfree.create_engine("backprop").attach(module):
            for a, e in zip(gradients(), expected, strict=True):
                torch.testing.assert_close(a, e, rtol=0.05, atol=0.03 * e.abs().max().item())


def refusal(engine, model, chains=None):
    with pytest.raises(ChainError) as error:
        engine.attach(model, chains)
    assert "forward" not in vars(model)
    return str(error.value)


def test_what_cannot_be_supported_is_refused():
    engine = gradfree.create_engine("dsf")
    assert "proj_size=2, which no engine supports" in refusal(engine, nn.LSTM(3, 4, proj_size=2))

    class Changed(nn.GRU):
        def forward(self, x, hx=None):
            return super().forward(2 * x, hx)

    assert "is a Changed with a forward of its own" in refusal(engine, Changed(3, 4))
    module = nn.GRU(3, 4)
    with engine.attach(module), pytest.raises(ChainError, match="has an engine attached already"):
        engine.attach(module)


@pytest.mark.parametrize(("name", "options"), [("highway_bp", {}), ("dsf", {"feedback": "gate"})])
def test_engines_that_need_a_gate_refuse_a_cell_without(name, options):
    engine, model = gradfree.create_engine(name, **options), LanguageModel("rnn_tanh")
    assert "'rnn' has no gate that carries its state from step to step" in str(engine.validate(model))
    assert "'fixed_point'" in refusal(engine, model)


def test_dsf_gate_ignores_padding_and_batches_that_are_not_finite_or_empty():
    module = nn.GRU(INPUT, HIDDEN)
    x = torch.randn(6, 2, INPUT)
    lengths = torch.tensor([6, 2], device="cpu")
    engine = gradfree.create_engine("dsf", feedback="gate")

    def mean_after(*inputs):
        with engine.attach(module) as handle:
            for given in inputs:
                out = module(given)[0]
                (out.data if isinstance(out, nn.utils.rnn.PackedSequence) else out).sum().backward()
            return handle.state_dict()[""]["mean of 0.0.0"]

    alone = mean_after(pack_padded_sequence(x, lengths))
    other_padding = torch.where(torch.arange(6).view(-1, 1, 1) < lengths.view(1, -1, 1), x, 1e3)
    torch.testing.assert_close(mean_after(pack_padded_sequence(other_padding, lengths)), alone)
    whole = mean_after(x[:, :1])
    assert not torch.allclose(whole, alone)
    for broken in (x * float("nan"), x[:, :0]):
        assert torch.equal(mean_after(x[:, :1], broken), whole)


def test_weights_that_are_computed_are_computed_once_as_in_the_module_itself():
    """Spectral norm takes a step of power iteration each time its weight is read."""
    tasks = []
    for _ in range(2):
        torch.manual_seed(0)
        tasks.append(Task("gru", 5, options={"num_layers": 2}))
        nn.utils.parametrizations.spectral_norm(tasks[-1].module, "weight_hh_l1")
    task, other = tasks
    outputs, expected = task.run(), task.gradients()
    with gradfree.create_engine("backprop").attach(other.module):
        assert all(map(torch.equal, other.run(), outputs))
        assert_close(other.gradients(), expected)
    for name, buffer in task.module.named_buffers():
        assert torch.equal(buffer, other.module.get_buffer(name))


def test_inside_a_checkpoint():
    task = Task("gru", 5)
    expected = torch.autograd.grad(task.module(task.x)[0].pow(2).sum(), list(task.module.parameters()))
    with gradfree.create_engine("backprop").attach(task.module):
        out = checkpoint(lambda x: task.module(x)[0], task.x, use_reentrant=False)
        assert_close(torch.autograd.grad(out.pow(2).sum(), list(task.module.parameters())), expected)


def test_dsf_refuses_a_feedback_of_another_width():
    task = Task("gru", 5)
    with (
        gradfree.create_engine("dsf", feedback=torch.rand(3)).attach(task.module),
        pytest.raises(ChainError, match="feedback has 3 numbers, but the states have 4 units"),
    ):
        task.gradients()


@pytest.mark.parametrize(
    ("feedback", "error", "message"),
    [
        ("gates", ValueError, "feedback must be 'linspace', 'gate', a number or a tensor, not 'gates'"),
        (None, TypeError, "feedback must be 'linspace', 'gate', a number or a tensor, not None"),
        (float("nan"), ValueError, "one finite number, or one for each unit"),
        (True, TypeError, "feedback must be 'linspace', 'gate', a number or a tensor, not True"),
        ([], ValueError, "one finite number, or one for each unit"),
        (torch.rand(2, 2), ValueError, "one finite number, or one for each unit"),
    ],
)
def test_dsf_refuses_other_feedbacks(feedback, error, message):
    with pytest.raises(error, match=message):
        gradfree.create_engine("dsf", feedback=feedback)


def test_torchs_own_checks_of_input_and_state_stay():
    for module, arguments in (
        (nn.GRU(3, 4), (torch.randn(5, 2, 7),)),
        (nn.GRU(3, 4), (torch.randn(5, 2, 3), torch.randn(1, 3, 4))),
        (nn.LSTM(3, 4), (torch.randn(5, 2, 3), (torch.randn(1, 2, 4), torch.randn(1, 3, 4)))),
    ):
        with pytest.raises(RuntimeError) as expected:
            module(*arguments)
        with gradfree.create_engine("dsf").attach(module), pytest.raises(RuntimeError) as actual:
            module(*arguments)
        assert str(actual.value) == str(expected.value)


def test_second_derivatives_are_refused():
    task = Task("gru", 5)
    with gradfree.create_engine("backprop").attach(task.module), pytest.raises(ChainError, match="second derivatives"):
        torch.autograd.grad(task.run()[0].sum(), task.x, create_graph=True)


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_anomaly_detection_names_the_layer_of_a_non_finite_cotangent():
    model, tokens = LanguageModel(), torch.randint(11, (4, 9))
    with gradfree.create_engine("dsf").attach(model), torch.autograd.detect_anomaly():
        out = model.rnn(model.embedding(tokens))[0]
        out.register_hook(lambda grad: grad * float("inf"))
        with pytest.raises(ChainError, match="non-finite cotangent at the output of rnn, layer 1"):
            out.sum().backward()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(3, 4, 2, bidirectional=True),
        lambda: nn.GRU(3, 4),
        lambda: gradfree.CellLayer(nn.LSTMCell(3, 4)),
        lambda: gradfree.CellLayer(nn.GRUCell(3, 4)),
    ],
)
def test_a_rank_without_a_mean_joins_the_average_of_the_others(make, monkeypatch):
    """One collective of one shape on each rank, also where a chain was unused: else the others would wait for ever."""
    sent, engine = [], gradfree.create_engine("dsf", feedback="gate")
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda x: sent.append(x.clone()))
    model, x = nn.ModuleDict({"used": make(), "unused": make()}), torch.randn(5, 2, 3)
    with (
        engine.attach(model) as first,
        engine.attach(other := nn.ModuleDict({"used": make(), "unused": make()})) as late,
    ):
        model["used"](x)[0].sum().backward()
        own = first.state_dict()["used"]
        first.average_over_ranks()
        monkeypatch.setattr("torch.distributed.all_reduce", lambda x: sent.append(x.clone()) or x.add_(sent[0]))
        late.average_over_ranks()
        assert [x.shape for x in sent] == [sent[0].shape] * 2
        received = late.state_dict()
        assert received["used"].keys() == own.keys()
        assert all(torch.equal(received["used"][key], mean) for key, mean in own.items())
        other["unused"](x)[0].sum().backward()
        assert all(mean.isfinite().all() for mean in late.state_dict()["unused"].values())
