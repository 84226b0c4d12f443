"""Cells in a ``CellLayer`` under the exact engines: the loop in segments, or as it is."""

import warnings

import pytest
import torch
from oracles import off_by
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode

import gradfree
from gradfree import CellLayer
from gradfree.models.para_rnn import ParaGRUCell, ParaLSTMCell

T, B, I, H = 45, 3, 3, 4  # noqa: E741
ENGINES = [("backprop", {}), ("shooting", {"segments": 6, "burn": 7, "max_sweeps": 5, "tolerance": 1e-14})]


class Leaky(nn.Module):
    hidden_size = H

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(I + H, H)

    def forward(self, x, state):
        return 0.6 * state + torch.tanh(self.network(torch.cat([x, state], -1)))


class Spans(Leaky):
    """Takes an input and a time span a step."""

    def forward(self, x, state):
        x, span = x
        return torch.lerp(state, super().forward(x, 0.3 * state), span)


class Scratch(Leaky):
    """Keeps its last state in a buffer, as snnTorch's neurons do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mem", torch.zeros(H))

    def forward(self, x, state):
        self.mem = state
        self.mem = super().forward(x, self.mem)
        return self.mem


def gradients(layer, run):
    torch.manual_seed(1)
    x = torch.randn(T, B, I, requires_grad=True)
    outputs = run(layer, x)
    loss = sum((out.sin() * (n + 1)).sum() for n, out in enumerate(outputs))
    return [*(out.detach() for out in outputs), *torch.autograd.grad(loss, [x, *layer.parameters()])]


def compared(layer, run, engine, options, cut=True):
    """Return how far the engine is from the layer without an engine."""
    expected = gradients(layer, run)
    with gradfree.create_engine(engine, **options).attach(layer), gradfree.engine_figures() as figures:
        actual = gradients(layer, run)
    assert (engine == "shooting" and cut) == any(of["sequential"] == 0 for of in figures.values())
    return off_by(actual, expected)


def flat(out, final):
    return [out, *(final if isinstance(final, tuple) else (final,))]


def plain(layer, x):
    return flat(*layer(x))


def packed(layer, x):
    lengths = torch.tensor([30, T, 17], device="cpu")
    given = pack_padded_sequence(x, lengths, enforce_sorted=False)
    out, final = layer(given, 0.1 * torch.ones(B, H) * torch.arange(1.0, 4)[:, None])
    return flat(pad_packed_sequence(out)[0], final)


def packed_pair(layer, x):
    given = pack_padded_sequence(x, torch.tensor([30, T, 17], device="cpu"), enforce_sorted=False)
    out, final = layer(given, (0.1 * torch.ones(B, H), 0.2 * torch.ones(B, H) * torch.arange(1.0, 4)[:, None]))
    return flat(pad_packed_sequence(out)[0], final)


def spans(layer, x):
    return flat(*layer((x, torch.sigmoid(x[..., :1])), torch.zeros(B, H)))


def resets(layer, x):
    generator = torch.Generator(x.device).manual_seed(3)
    resets = torch.rand(T, B, generator=generator) < 0.05
    return flat(*gradfree.run_with_resets(layer, x, None, resets))


CASES = {
    "one state": (Leaky, plain),
    "torch's LSTM cell": (lambda: nn.LSTMCell(I, H), plain),
    "a tuple of inputs": (Spans, spans),
    "packed sequences": (Leaky, packed),
    "resets": (Leaky, resets),
    "resets of two states": (lambda: nn.LSTMCell(I, H), resets),
    "separate units": (lambda: ParaGRUCell(I, H, 0.5), plain),
    "separate units, packed": (lambda: ParaLSTMCell(I, H, 0.5), packed_pair),
    "separate units, resets": (lambda: ParaLSTMCell(I, H, 0.5), resets),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("engine", "options"), ENGINES)
def test_exact_engines_equal_the_layer(case, engine, options):
    make, run = CASES[case]
    assert compared(CellLayer(make()), run, engine, options) < 1e-10


def test_packed_sequences_equal_the_cell_on_each_sequence():
    layer, x = CellLayer(Leaky()), torch.randn(T, B, I)
    out, final = packed(layer, x)
    for n, length in enumerate((30, T, 17)):
        own, last = layer(x[:length, n : n + 1], torch.full((1, H), 0.1 * (n + 1)))
        assert off_by([out[:length, n : n + 1], final[n : n + 1]], [own, last]) < 1e-12


@pytest.mark.parametrize(("engine", "options"), ENGINES)
def test_cells_that_write_to_buffers_are_cut_if_they_are_declared_scratch(engine, options):
    layer = CellLayer(Scratch(), scratch=True)
    assert compared(layer, plain, engine, options) < 1e-10
    assert not torch._C._functorch.is_batchedtensor(layer.cell.mem)
    assert compared(CellLayer(Scratch()), plain, engine, options, cut=False) == 0.0


class Keeping(Leaky):
    """Keeps what it computes in the first step of a sequence."""

    kept = None

    def forward(self, x, state):
        if self.kept is None:
            self.kept = torch.ones(I)
        return super().forward(x * self.kept, state)


def test_an_attribute_of_scratch_may_be_none_or_a_tensor():
    def run(layer, x):
        layer.cell.kept = None
        return plain(layer, x)

    assert compared(CellLayer(Keeping(), scratch=True), run, "shooting", {"segments": 6}) < 1e-10


def test_what_a_cell_keeps_is_named_at_the_second_call():
    """The first one may have filled a cache."""
    layer, x = CellLayer(Scratch()), torch.randn(T, B, I)
    with gradfree.create_engine("shooting", segments=6).attach(layer):
        layer(x)
        with pytest.warns(UserWarning, match=r"changes cell\.mem"):
            layer(x)


class Dropping(Leaky):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, state):
        return self.dropout(super().forward(x, state))


@pytest.mark.filterwarnings("ignore:.*runs step by step")
@pytest.mark.parametrize(("engine", "options"), ENGINES)
def test_random_cells_draw_the_loops_numbers(engine, options):
    assert compared(CellLayer(Dropping()), plain, engine, options, cut=False) == 0.0


class DroppingUnits(ParaGRUCell):
    def __init__(self):
        super().__init__(I, H, 0.5)
        self.dropout = nn.Dropout(0.3)

    def advance(self, fed, state):
        return tuple(map(self.dropout, super().advance(fed, state)))


@pytest.mark.filterwarnings("ignore:.*runs step by step")
@pytest.mark.parametrize(("engine", "options"), ENGINES)
def test_separate_units_may_draw_unless_they_run_at_once(engine, options):
    layer = CellLayer(DroppingUnits())
    assert compared(layer, plain, engine, options, cut=False) == 0.0
    assert "dropout" in str(gradfree.create_engine("newton").validate(layer))


class CountingUnits(ParaGRUCell):
    """Has a second part of integers."""

    parts = 2

    def advance(self, fed, state):
        return (*super().advance(fed, state[:1]), state[1] + 1)


@pytest.mark.parametrize(("engine", "options"), [*ENGINES, ("newton", {"max_sweeps": 20})])
def test_separate_units_may_count(engine, options):
    layer, count = CellLayer(CountingUnits(I, H, 0.5)), torch.zeros(B, H, dtype=torch.int64)
    found = []
    for attached in (False, True):
        handle = gradfree.create_engine(engine, **options).attach(layer) if attached else None
        found.append(gradients(layer, lambda layer, x: flat(*layer(x, (torch.zeros(B, H), count)))[:2]))
        if handle:
            handle.detach()
    assert off_by(found[1], found[0]) < 1e-10


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_cut_too(mode):
    layer, x = CellLayer(nn.GRUCell(I, H)), torch.randn(400, B, I)
    with mode():
        expected = layer(x)
        calls = Calls(layer.cell)
        with gradfree.create_engine("shooting", segments=10, tolerance=1e-11).attach(layer):
            assert off_by(layer(x), expected) < 1e-10
    assert calls.count < 400


@pytest.mark.filterwarnings("ignore:.*runs step by step")
def test_what_draws_in_training_only_is_cut_in_evaluation():
    layer, x = CellLayer(Dropping()), torch.randn(400, B, I)
    with gradfree.create_engine("shooting", segments=10, tolerance=1e-11).attach(layer):
        for _ in range(3):
            layer(x)[0].sum().backward()
        layer.eval()
        calls = Calls(layer.cell)
        with torch.no_grad():
            found = layer(x)
        assert calls.count < 400
    assert off_by(found, layer(x)) < 1e-10


class Calls:
    """Counts calls out of sight: what a step keeps elsewhere makes it run step by step."""

    __slots__ = ("count",)

    def __init__(self, module):
        self.count = 0
        module.register_forward_pre_hook(self.add)

    def add(self, *_):
        self.count += 1


class Long(Leaky):
    """Never forgets."""

    def forward(self, x, state):
        return state + 0.1 * x.sum(-1, keepdim=True)


@pytest.mark.parametrize("train", [True, False])
def test_layers_with_long_memory_are_the_loop_and_are_remembered(train):
    layer, x = CellLayer(Long()), torch.randn(400, B, I, requires_grad=True)
    start = torch.zeros(B, H)
    expected = layer(x, start)[0]
    with torch.set_grad_enabled(train), gradfree.create_engine("shooting", segments=40).attach(layer):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = layer(x, start)[0]
            if train:
                out.sum().backward()
        assert "has long memory" in str(caught[0].message)
        assert torch.equal(out, expected)
        calls = Calls(layer.cell)
        layer(x, start)
    assert calls.count == 400


@pytest.mark.parametrize("compiles", [False, True])
def test_a_layer_may_be_part_of_what_is_compiled_as_a_whole(compiles):
    """No graph breaks at the layer, which compiles nothing then."""
    layer, x = CellLayer(nn.LSTMCell(3, 4), compile=compiles), torch.randn(19, 2, 3)
    expected = CellLayer(layer.cell)(x)[0]
    assert off_by([torch.compile(layer, backend="eager", fullgraph=True)(x)[0]], [expected]) < 1e-12
    assert off_by([torch.export.export(layer, (x,), strict=True).module()(x)[0]], [expected]) < 1e-12


def test_a_layer_that_compiles_has_the_flops_of_the_plain_loop():
    """The counter puts hooks on the states, which are right where nothing is compiled."""
    layer, x, counts = CellLayer(nn.GRUCell(3, 4), compile=True), torch.randn(19, 2, 3), []
    for each in (layer, CellLayer(layer.cell)):
        with FlopCounterMode(display=False) as counter:
            each(x)[0].sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
