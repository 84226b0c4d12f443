"""Calls of recurrent layers that exact engines leave to torch's kernel, and warnings about slower engines."""

import warnings
from functools import partial

import pytest
import torch
from oracles import off_by
from recurrent_tasks import everything, remembering
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence

import gradfree
from gradfree.time.torch_layer_site import LayerFunction


@pytest.fixture
def solved(monkeypatch):
    """The lengths of the sequences that an engine, not torch, has run."""
    lengths = []

    def seen(layer, x, *rest, run=LayerFunction.apply):
        lengths.append(len(x))
        return run(layer, x, *rest)

    monkeypatch.setattr(LayerFunction, "apply", seen)
    return lengths


class Packed(nn.Module):
    """Packs sequences of equal length for its layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.weight_hh_l0 = layer.weight_hh_l0

    def forward(self, x):
        out, final = self.layer(pack_padded_sequence(x, torch.full((x.shape[1],), len(x), device="cpu")))
        return out.data, final


LEFT = {
    "an LSTM in float32, wide": (lambda: nn.LSTM(3, 64).float(), (20, 64, 3)),
    "stacked, both directions": (lambda: nn.LSTM(3, 8, 2, bidirectional=True).float(), (20, 4, 3)),
    "an LSTM in float32, packed": (lambda: Packed(nn.LSTM(3, 8).float()), (20, 4, 3)),
    "a wide batch of a width that is no multiple of 16": (lambda: nn.GRU(3, 100), (20, 48, 3)),
    "a batch in float16": (lambda: nn.GRU(3, 8).half(), (20, 4, 3)),
    "short, batch first": (lambda: nn.GRU(3, 8, batch_first=True), (4, 5, 3)),
}


@pytest.mark.parametrize("engine", ["shooting", "newton"])
@pytest.mark.parametrize("case", LEFT)
def test_layers_left_to_torch_are_bitwise_torchs(engine, case, solved):
    make, shape = LEFT[case]
    layer = make()
    x = torch.randn(shape, dtype=layer.weight_hh_l0.dtype, requires_grad=True)
    expected = everything(layer, x)
    with gradfree.create_engine(engine).attach(layer) as handle:
        found = everything(layer, x)
        assert all(map(torch.equal, found, expected))
        assert len(next(iter(handle.chains.values())).solved) == 1
        handle.watch()
    assert not solved


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("engine", ["shooting", "newton", "backprop", "auto"])
def test_layers_with_projections_are_left_to_torch(engine, packed, solved):
    """The rest of the model is attached to."""
    layer = nn.LSTM(3, 8, 2, proj_size=4, bidirectional=True)
    model = nn.ModuleList([Packed(layer) if packed else layer, nn.GRU(8, 16)])
    x = torch.randn(20, 4, 3, requires_grad=True)

    def results():
        out, final = model[0](x)
        loss = model[1](out.unflatten(0, (20, 4)) if packed else out)[0].square().sum() + sum(map(torch.sum, final))
        return [out, *final, *torch.autograd.grad(loss, [x, *model.parameters()])]

    expected = results()
    with gradfree.create_engine(engine).attach(model):
        assert off_by(results(), expected) < 1e-10
        with torch.no_grad():
            assert torch.equal(model[1](expected[0].view(20, 4, 8))[0], model[1](expected[0].view(20, 4, 8))[0])
    assert solved in ([], [20])


def test_a_subclass_with_projections_is_left_to_torch():
    class Mine(nn.LSTM):
        def forward(self, x, hx=None):
            return super().forward(x, hx)

    layer, x = Mine(3, 8, proj_size=4), torch.randn(5, 2, 3, requires_grad=True)
    expected = everything(layer, x)
    with gradfree.create_engine("shooting").attach(layer):
        assert off_by(everything(layer, x), expected) == 0


def test_engines_that_leave_nothing_to_torch_refuse_projections():
    with pytest.raises(gradfree.ChainError, match="'1' has proj_size=2, which only 'shooting', 'newton'"):
        gradfree.create_engine("dsf").attach(nn.ModuleList([nn.GRU(3, 4), nn.LSTM(3, 4, proj_size=2)]))


@pytest.mark.parametrize("engine", ["shooting", "newton"])
def test_under_autocast_layers_are_left_to_torch_too(engine, solved):
    """The sizes at which that pays depend on the precision in which torch's kernel runs then."""
    layer = nn.LSTM(3, 64, 2).float()
    x = torch.randn(20, 4, 3, dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = everything(layer, x)
        with gradfree.create_engine(engine).attach(layer):
            found = everything(layer, x)
    assert all(map(torch.equal, found, expected))
    assert not solved


def test_wide_batches_of_a_gru_under_autocast_are_left_to_torch(solved):
    layer, x = nn.GRU(3, 128).float(), torch.randn(20, 32, 3, dtype=torch.float32, requires_grad=True)
    with gradfree.create_engine("shooting").attach(layer), torch.autocast("cpu", torch.bfloat16):
        everything(layer, x)
        assert not solved
        everything(layer, x[:, :4])
    assert solved == [20]


def test_a_call_left_to_torch_says_nothing_of_other_calls_of_the_same_shape(solved):
    layer, x = nn.GRU(3, 128).float(), torch.randn(20, 32, 3, dtype=torch.float32, requires_grad=True)
    expected = everything(layer, x)
    with gradfree.create_engine("shooting").attach(layer):
        for left in (torch.autocast("cpu", torch.bfloat16), FakeTensorMode(allow_non_fake_inputs=True)):
            with left:
                layer(torch.randn(20, 32, 3, dtype=torch.float32))
            assert not solved
            assert off_by(everything(layer, x), expected) < 1e-5
            assert solved == [20]
            solved.clear()


@pytest.mark.filterwarnings("ignore:.*slower than torch's own kernel")
@pytest.mark.parametrize("now", ["with gradients", "watched", "by another engine", "batch first"])
def test_a_layer_left_to_torch_is_asked_again(now, solved):
    layer = nn.GRU(3, 8) if now in ("with gradients", "batch first") else nn.LSTM(3, 8).float()
    shape = (4, 80, 3) if now == "batch first" else (80, 4, 3)
    x = torch.randn(shape, dtype=layer.weight_hh_l0.dtype, requires_grad=True)
    with gradfree.create_engine("shooting").attach(layer) as handle:
        with torch.set_grad_enabled(now != "with gradients"):
            layer(x)
        assert not solved
        if now == "watched":
            gradfree.GradientWatch().start(handle)
        elif now == "by another engine":
            handle.attachments[""].engine = gradfree.create_engine("backprop")
        layer.batch_first = now == "batch first"
        layer(x)
    assert solved == [80]


@pytest.mark.parametrize("earlier", [0, 1])
def test_calls_that_are_never_swept_leave_pauses_as_they_are(earlier):
    """Whether the engine has been asked about them before or not: a resumed training makes the same choices."""
    layer, short = nn.LSTM(3, 8).float(), torch.randn(8, 2, 3).float()
    with gradfree.create_engine("shooting").attach(layer) as handle:
        for _ in range(earlier):
            layer(short)[0].sum().backward()
        paused = {"": {"segments: pause forward l0": torch.tensor([50, 50])}}
        handle.load_state_dict(paused)
        for _ in range(2):
            layer(short)[0].sum().backward()
        ((_, kept),) = handle.state_dict()[""].items()
    assert kept.tolist() == [50, 50]


@pytest.mark.slow
def test_a_trained_layer_is_exported_with_a_batch_of_any_size():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(3, 8, batch_first=True).float()

        def forward(self, x):
            return self.layer(x)[0]

    model, x = Model(), torch.randn(4, 20, 3).float()
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    with gradfree.create_engine("shooting").attach(model):
        model(x).sum().backward()
        program = torch.export.export(model, (x,), dynamic_shapes=(batch,), strict=False)
    other = torch.randn(6, 20, 3).float()
    assert torch.equal(program.module()(other), model(other))


@pytest.mark.parametrize("make", [lambda: nn.GRU(3, 16), lambda: gradfree.CellLayer(nn.GRUCell(3, 16))])
def test_long_sequences_without_values_run_as_without_an_engine(make):
    """As memory estimators run a model."""
    layer = make()
    with gradfree.create_engine("shooting", segments=4).attach(layer), FakeTensorMode(allow_non_fake_inputs=True):
        out, _ = layer(torch.randn(128, 4, 3))
        out.sum().backward()
    assert out.shape == (128, 4, 16)
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_a_layer_refuses_integers_as_without_an_engine():
    layer = nn.GRU(3, 16)
    with gradfree.create_engine("shooting").attach(layer), pytest.raises(ValueError, match="match weight dtype"):
        layer(torch.ones(300, 4, 3, dtype=torch.long))


ENGINES = ["dsf", "deeppcr", "newton", "fixed_point", "truncated", "rtrl", "snap", "uoro"]


@pytest.mark.filterwarnings("ignore:.*A CellLayer hides the gate", "ignore:the cell layer")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_cell_layer_without_values_has_gradients_of_the_right_shape(engine):
    layer = gradfree.CellLayer(nn.GRUCell(3, 4))
    with gradfree.create_engine(engine).attach(layer), FakeTensorMode(allow_non_fake_inputs=True):
        layer(torch.randn(8, 2, 3))[0].sum().backward()
    assert all(p.grad.shape == p.shape for p in layer.parameters())


@pytest.mark.filterwarnings("ignore:.*A CellLayer hides the gate", "ignore:the cell layer")
@pytest.mark.parametrize("kind", [lambda: nn.GRU(3, 4), lambda: gradfree.CellLayer(nn.GRUCell(3, 4))])
@pytest.mark.parametrize(
    ("engine", "length"), [("shooting", 128), *[(name, 9) for name in ("shooting", "backprop", "auto", *ENGINES)]]
)
def test_layers_on_the_meta_device_run_as_without_an_engine(engine, length, kind):
    layer = kind().to("meta")
    with gradfree.create_engine(engine).attach(layer):
        out, _ = layer(torch.empty(length, 2, 3, device="meta"))
        out.sum().backward()
    assert out.shape == (length, 2, 4)
    assert all(p.grad.shape == p.shape for p in layer.parameters())


def test_layers_in_segments_or_faster_in_closed_form_run_by_the_engine(solved):
    for layer, length in ((nn.GRU(3, 8).float(), 2048), (nn.GRU(3, 64), 64)):
        x = torch.randn(length, 1, 3, dtype=layer.weight_hh_l0.dtype, requires_grad=True)
        with gradfree.create_engine("shooting").attach(layer):
            everything(layer, x)
    assert solved == [2048, 64]


@pytest.mark.filterwarnings("ignore:.*has long memory")
def test_a_layer_with_long_memory_is_left_to_torch_until_the_next_trial(solved):
    """The other layer of the stack still runs in segments."""
    layer = remembering(12.0, partial(nn.LSTM, num_layers=2)).float()
    x = torch.randn(512, 1, 3, dtype=torch.float32, requires_grad=True)
    expected = everything(layer, x)
    with gradfree.create_engine("shooting", segments=16).attach(layer):
        runs = []
        for _ in range(53):
            before = len(solved)
            assert off_by(everything(layer, x), expected) < 1e-4
            runs.append(len(solved) - before)
    assert runs[0] == 2
    assert runs[1:51] == [1] * 50
    assert runs[51] == 2


def test_backprop_warns_once_if_torchs_kernel_is_faster():
    layer, x = nn.LSTM(3, 8).float(), torch.randn(20, 2, 3, dtype=torch.float32)
    with gradfree.create_engine("backprop").attach(layer):
        with pytest.warns(UserWarning, match="slower than torch's own kernel"):
            layer(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(x)
    with warnings.catch_warnings(), gradfree.create_engine("backprop").attach(nn.GRU(3, 64)) as handle:
        warnings.simplefilter("error")
        handle.blocks[""](torch.randn(64, 2, 3))


@pytest.mark.parametrize("first", [1, 5])
@pytest.mark.parametrize("make", [lambda: nn.GRU(3, 4), lambda: gradfree.CellLayer(nn.GRUCell(3, 4))])
def test_calls_of_single_steps_warn_once_and_name_run_with_resets(make, first):
    layer = make()
    with gradfree.create_engine("shooting").attach(layer), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in [first] + [1] * 50:
            layer(torch.randn(length, 2, 3))
    assert ["run_with_resets" in str(each.message) for each in caught] == [True] * (first == 1)
