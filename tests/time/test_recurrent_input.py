"""Odd input to recurrent layers: what torch's own module does with it, an attached engine does too."""

import pytest
import torch
from oracles import assert_close
from pairwise import pairwise
from recurrent_tasks import CELLS
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import gradfree
from gradfree import CellLayer, ChainError

INPUT, HIDDEN, LENGTH, BATCH = 3, 4, 5, 2
WIDE = 128  # GRUs of this width keep their gates, by a forward pass of their own.
NAMES = ["backprop", "truncated", "fixed_point", "dsf"]


def engines():
    for name in NAMES:
        yield gradfree.create_engine(name)


def snapshot(module):
    return [p.detach().clone() for p in module.parameters()], [p.grad is None for p in module.parameters()]


def states(module, *shape):
    parts = [torch.randn(shape) for _ in range(2 if isinstance(module, nn.LSTM) else 1)]
    return tuple(parts) if len(parts) > 1 else parts[0]


BAD = {
    "no steps": lambda m: (torch.randn(0, BATCH, INPUT),),
    "no steps, alone": lambda m: (torch.randn(0, INPUT),),
    "too few dimensions": lambda m: (torch.randn(INPUT),),
    "too many dimensions": lambda m: (torch.randn(2, LENGTH, BATCH, INPUT),),
    "other features": lambda m: (torch.randn(LENGTH, BATCH, INPUT + 1),),
    "other dtype": lambda m: (torch.randn(LENGTH, BATCH, INPUT).float(),),
    "integers": lambda m: (torch.ones(LENGTH, BATCH, INPUT, dtype=torch.long),),
    "states of another batch": lambda m: (torch.randn(LENGTH, BATCH, INPUT), states(m, 1, BATCH + 1, HIDDEN)),
    "states of more layers": lambda m: (torch.randn(LENGTH, BATCH, INPUT), states(m, 2, BATCH, HIDDEN)),
    "states of another width": lambda m: (torch.randn(LENGTH, BATCH, INPUT), states(m, 1, BATCH, HIDDEN + 1)),
    "states without batch": lambda m: (torch.randn(LENGTH, BATCH, INPUT), states(m, 1, HIDDEN)),
    "states of a batch for one alone": lambda m: (torch.randn(LENGTH, INPUT), states(m, 1, 1, HIDDEN)),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("cell", CELLS)
def test_what_torch_refuses_is_refused_in_its_words_and_changes_nothing(cell, bad):
    module = CELLS[cell](INPUT, HIDDEN)
    arguments, before = BAD[bad](module), snapshot(module)
    with pytest.raises((RuntimeError, ValueError)) as expected:
        module(*arguments)
    for engine in engines():
        with engine.attach(module) as handle:
            with pytest.raises(expected.type) as actual:
                module(*arguments)
            assert str(actual.value) == str(expected.value)
            assert handle.state_dict() == {}
    after = snapshot(module)
    assert all(map(torch.equal, before[0], after[0]))
    assert before[1] == after[1]


@pytest.mark.parametrize("shape", [(0, 64, WIDE), (LENGTH, 64, WIDE + 1)])
def test_a_gru_that_would_keep_its_gates_refuses_alike(shape):
    module, x = nn.GRU(WIDE, WIDE), torch.randn(shape)
    with pytest.raises(RuntimeError) as expected:
        module(x)
    with gradfree.create_engine("dsf").attach(module), pytest.raises(RuntimeError) as actual:
        module(x)
    assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("batch", [BATCH - 1, BATCH])
@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("cell", CELLS)
def test_packed_sequences_want_a_state_each(cell, sort, batch):
    """The message is the module's own, but for an LSTM: torch's speaks of no state there."""
    module = CELLS[cell](INPUT, HIDDEN)
    lengths = torch.tensor([5, 3, 2] if sort else [2, 5, 3], device="cpu")
    packed = pack_padded_sequence(torch.randn(LENGTH, 3, INPUT), lengths, enforce_sorted=sort)
    arguments = packed, states(module, 1, batch, HIDDEN)
    with pytest.raises((RuntimeError, IndexError)):
        module(*arguments)
    for engine in engines():
        with engine.attach(module), pytest.raises((RuntimeError, IndexError), match=r"size|bounds|range"):
            module(*arguments)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_batch_of_no_sequences_gives_gradients_of_zero(cell, bidirectional):
    module = CELLS[cell](INPUT, HIDDEN, num_layers=2, bidirectional=bidirectional)
    x = torch.randn(LENGTH, 0, INPUT, requires_grad=True)

    def run():
        out = module(x)[0]
        return out, torch.autograd.grad(out.sum(), [x, *module.parameters()])

    out, expected = run()
    assert all(not g.any() for g in expected)
    for engine in engines():
        with engine.attach(module):
            again, actual = run()
        assert again.shape == out.shape
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("cell", CELLS)
def test_non_finite_initial_states_pass_as_in_backprop(cell, value):
    """GradScaler must see what comes of them."""
    module, x = CELLS[cell](INPUT, HIDDEN), torch.randn(LENGTH, BATCH, INPUT)
    first = states(module, 1, BATCH, HIDDEN)
    (first[0] if isinstance(first, tuple) else first)[0, 0, 0] = value

    def run():
        out = module(x, first)[0]
        return out, torch.autograd.grad(out.sum(), list(module.parameters()))

    out, expected = run()
    for engine in engines():
        with engine.attach(module):
            again, actual = run()
        assert torch.equal(again.nan_to_num(7.0), out.nan_to_num(7.0))
        assert any(not g.isfinite().all() for g in actual) == any(not g.isfinite().all() for g in expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cell", CELLS)
def test_under_anomaly_detection_they_raise_and_the_layer_is_named(cell, name, value):
    model, x = nn.ModuleDict({"rnn": CELLS[cell](INPUT, HIDDEN, num_layers=2)}), torch.randn(LENGTH, BATCH, INPUT)
    first = states(model.rnn, 2, BATCH, HIDDEN)
    (first[0] if isinstance(first, tuple) else first)[0] = value
    with gradfree.create_engine(name).attach(model), torch.autograd.detect_anomaly():
        out = model.rnn(x, first)[0]
        with pytest.raises(ChainError, match=r"non-finite (gradient in|cotangent at the output of) rnn, layer \d"):
            out.sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_under_anomaly_detection_a_cell_layer_is_named():
    model, x = nn.ModuleDict({"rnn": gradfree.CellLayer(nn.GRUCell(INPUT, HIDDEN))}), torch.randn(LENGTH, BATCH, INPUT)
    with gradfree.create_engine("dsf").attach(model), torch.autograd.detect_anomaly():
        out = model.rnn(x, torch.full((BATCH, HIDDEN), float("nan")))[0]
        with pytest.raises(ChainError, match="non-finite gradient in rnn: NaN or inf is in its input"):
            out.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_a_projection_is_refused_with_its_path_and_changes_nothing(name):
    model = nn.ModuleDict({"rnn": nn.LSTM(INPUT, HIDDEN, proj_size=2)})
    before, engine = snapshot(model), gradfree.create_engine(name)
    assert "'rnn' has proj_size=2, which no engine supports. Use proj_size=0." in str(engine.validate(model))
    with pytest.raises(ChainError, match="'rnn' has proj_size=2"):
        engine.attach(model)
    assert "forward" not in vars(model.rnn)
    assert all(map(torch.equal, before[0], snapshot(model)[0]))


def test_a_packed_sequence_of_one_step_each():
    module, data = nn.GRU(INPUT, HIDDEN), torch.randn(3, INPUT, requires_grad=True)
    packed = PackedSequence(data, torch.tensor([3]))
    expected = torch.autograd.grad(module(packed)[0].data.sum(), [data, *module.parameters()])
    for engine in engines():
        with engine.attach(module):
            assert_close(torch.autograd.grad(module(packed)[0].data.sum(), [data, *module.parameters()]), expected)


def plus_in_place(out, x, module):
    out += x


def stepped(out, x, module):
    with torch.no_grad():
        next(module.parameters()).mul_(2)


@pytest.mark.parametrize("change", [plus_in_place, stepped])
@pytest.mark.parametrize("make", [lambda: nn.GRU(HIDDEN, HIDDEN), lambda: CellLayer(nn.GRUCell(HIDDEN, HIDDEN))])
def test_what_the_backward_pass_needs_must_not_be_changed_in_place(make, change):
    """Torch's own layers mind it in part, by the device; the layer and the remedy are named."""
    model, x = nn.ModuleDict({"rnn": make()}), torch.randn(LENGTH, BATCH, HIDDEN)
    for engine in engines():
        with engine.attach(model):
            out = model["rnn"](x)[0]
            loss = out.sum()
            change(out, x, model)
            with pytest.raises(ChainError, match=r"output of rnn.* were changed in place .* \(out = out \+ x"):
                loss.backward()
    assert all(p.grad is None for p in model.parameters())


@pairwise(
    dtype=[torch.float64, torch.float32, torch.bfloat16],
    cell=CELLS,
    bias=[False, True],
    batch_first=[False, True],
    frozen=[(), ("ih",), ("hh",)],
)
def test_outputs_are_bitwise_torchs_own_in_any_memory_layout(dtype, cell, bias, batch_first, frozen):
    """How torch rounds depends on dtype and strides, and on whether gradients are on and needed."""
    module = CELLS[cell](INPUT, HIDDEN, num_layers=2, bias=bias, batch_first=batch_first).to(dtype)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    sequences = {
        "alone": torch.randn(LENGTH, INPUT),
        "alone, every second feature": torch.randn(LENGTH, 2 * INPUT)[:, ::2],
        "alone, the same at all steps": torch.randn(INPUT).expand(LENGTH, INPUT),
        "transposed": torch.randn(INPUT, LENGTH, BATCH).permute(2, 1, 0),
        "every second feature": torch.randn(LENGTH, BATCH, 2 * INPUT)[..., ::2],
        "a batch of one": torch.randn(LENGTH, 1, INPUT),
    }
    for name, x in sequences.items():
        x = x.to(dtype)
        out, final = module(x)
        with gradfree.create_engine("backprop").attach(module):
            attached, attached_final = module(x)
        assert torch.equal(attached, out), name
        assert all(map(torch.equal, attached_final, final)), name


@pytest.mark.parametrize("engine", ["backprop", "truncated", "fixed_point", "dsf", "highway_bp", "shooting", "deeppcr"])
@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
def test_the_cotangent_of_the_outputs_is_not_written_to(engine, cell):
    """It may be somebody else's: no copy of it is made."""
    layer, x = cell(3, 4), torch.randn(40, 2, 3)
    cotangent = torch.randn(40, 2, 4)
    given = cotangent.clone()
    options = {"shooting": {"segments": 4}}.get(engine, {})
    with gradfree.create_engine(engine, **options).attach(layer):
        layer(x)[0].backward(cotangent)
    assert torch.equal(cotangent, given)
