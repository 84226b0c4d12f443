"""Packed sequences of several lengths: in runs, whole by torch, or as a grid, whichever is expected to be fastest.

Gradients in each layout are compared with torch's by the random programs.
"""

from unittest.mock import patch

import pytest
import torch
from oracles import off_by
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import gradfree
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.devices.packed_costs import in_calls, packed_layout
from gradfree.time.runs import runs_of

LONG = [(100, 8), (50, 6), (60, 2)]
SHORT = [(2, rows) for rows in range(12, 0, -1)]


def packed(*lengths, inputs=3, dtype=torch.float64):
    return pack_sequence([torch.randn(length, inputs, dtype=dtype) for length in lengths], enforce_sorted=False)


def everything(layer, given, *state):
    """Return outputs, final states and the gradients of all parameters and initial states."""
    out, final = layer(given, *([state] if state else []))
    found = [out.data, *(final if isinstance(final, tuple) else [final])]
    return [*found, *torch.autograd.grad(sum(part.sin().sum() for part in found), [*layer.parameters(), *state])]


def layouts(figures):
    return {name for path in figures.values() for name in path if name.startswith("packed")}


@pytest.mark.parametrize(
    ("kind", "runs", "shape", "trains", "expected"),
    [
        ("LSTM", LONG, (8, 64), True, "runs"),
        ("LSTM", LONG, (8, 64), False, "runs"),
        ("LSTM", SHORT, (12, 256), True, "runs"),
        ("LSTM", SHORT, (12, 64), False, "whole"),
        ("LSTM", [(4, 8), (4, 1)], (8, 64), True, "whole"),
        ("GRU", LONG, (8, 16), True, "grid"),
        ("GRU", [(rows, 130 - rows) for rows in range(1, 30)], (129, 128), True, "runs"),
        ("RNN_RELU", SHORT, (12, 64), False, "whole"),
    ],
)
def test_the_layout_follows_the_sizes(kind, runs, shape, trains, expected):
    assert packed_layout(kind, runs, torch.empty(shape, dtype=torch.float32), 32, trains) == expected


def test_other_devices_take_packed_sequences_whole():
    assert packed_layout("LSTM", LONG, torch.empty(8, 64, dtype=torch.float32, device="meta"), 32, True) == "whole"


def test_runs_of_batch_sizes():
    assert runs_of(torch.tensor([4, 4, 3, 1, 1, 1])) == [(2, 4), (1, 3), (3, 1)]
    assert runs_of(torch.tensor([2, 2])) == [(2, 2)]


@pytest.mark.parametrize("engine", ["shooting", "backprop", "newton"])
def test_an_lstm_runs_in_runs_in_training_and_evaluation(engine):
    """With torch's dropout masks, its parameters' gradients, and a report of what ran."""
    layer = nn.LSTM(3, 16, 2, bidirectional=True, dropout=0.5).float()
    given = packed(300, 100, 300, 101, dtype=torch.float32)
    state = [torch.randn(4, 4, 16, dtype=torch.float32, requires_grad=True) for _ in range(2)]
    torch.manual_seed(1)
    expected = everything(layer, given, *state)
    with gradfree.create_engine(engine).attach(layer) as handle:
        torch.manual_seed(1)
        with gradfree.engine_figures() as figures:
            assert off_by(everything(layer, given, *state), expected) < 1e-5
        assert figures[""] == {"packed in runs": 3}
        assert handle.chains[""].solved
        layer.eval()
        with torch.inference_mode(), gradfree.engine_figures() as figures:
            out, final = layer(given)
        assert layouts(figures) == {"packed in runs"}
    with torch.no_grad():
        assert off_by([out.data, *final], [layer(given)[0].data, *layer(given)[1]]) < 1e-5


def test_long_runs_are_cut_into_segments():
    layer, given = nn.GRU(3, 16), packed(1500, 1490, 700)
    expected = everything(layer, given)
    with gradfree.create_engine("shooting").attach(layer), gradfree.engine_figures() as figures:
        assert off_by(everything(layer, given), expected) < 1e-10
    assert layouts(figures) == {"packed in runs"}
    assert {"sweeps", "forward sweeps"} <= figures["l0"].keys()


@patch("gradfree.time.torch_layer_site.packed_layout", lambda *_, **__: "runs")
def test_comparisons_and_approximations_take_the_whole_chain():
    layer, given = nn.GRU(3, 16), packed(11, 8, 2)
    for engine, options in (("dsf", {"feedback": 0.5}), ("fixed_point", {})):
        with gradfree.create_engine(engine, **options).attach(layer), gradfree.engine_figures() as figures:
            everything(layer, given)
        assert layouts(figures) == {"packed as a grid"}
    engine = gradfree.create_engine("backprop")
    fidelity = gradfree.gradient_fidelity(engine, layer, lambda out, _: out[0].data.pow(2).sum(), (given, None))
    assert fidelity.states["l0"].relative_error < 1e-12


def test_several_lengths_have_their_layout_after_as_many_rows_of_one_length():
    layer = nn.LSTM(3, 16)
    with gradfree.create_engine("shooting").attach(layer):
        for lengths, expected in (((8, 8, 8), set()), ((8, 8, 4, 4), {"packed as a whole"})):
            with gradfree.engine_figures() as figures:
                layer(packed(*lengths))
            assert layouts(figures) == expected


def test_several_lengths_are_asked_for_their_layout_each_time():
    layer, given = nn.LSTM(3, 16), packed(8, 8, 4)
    with gradfree.create_engine("shooting").attach(layer):
        for layout, expected in (("whole", "packed as a whole"), ("runs", "packed in runs")):
            with (
                patch("gradfree.time.torch_layer_site.packed_layout", lambda *_, now=layout, **__: now),
                gradfree.engine_figures() as figures,
            ):
                layer(given)
            assert layouts(figures) == {expected}


def test_segments_that_are_asked_for_are_not_left_to_torch():
    layer, given = nn.LSTM(3, 16), packed(*range(1, 14))
    expected = everything(layer, given)
    for segments, cut in (("auto", False), (3, True)):
        engine = gradfree.create_engine("shooting", segments=segments)
        with engine.attach(layer), gradfree.engine_figures() as figures:
            assert off_by(everything(layer, given), expected) < 1e-10
        assert ("sweeps" in figures.get("l0", {})) == cut


def test_runs_need_no_more_memory_than_padding():
    layer, lengths = nn.LSTM(32, 64).float(), torch.tensor([240, 180, 160, 140, 120, 80, 80, 80, 60, 40, 40, 40, 20])
    x = torch.randn(240, 13, 32, dtype=torch.float32)
    given = pack_padded_sequence(x, lengths)
    peaks = [peak_memory(lambda: layer(x)[0].sum().backward(), "cpu")]
    layer.zero_grad()
    with gradfree.create_engine("shooting").attach(layer), gradfree.engine_figures() as figures:
        peaks.append(peak_memory(lambda: layer(given)[0].data.sum().backward(), "cpu"))
    assert layouts(figures) == {"packed in runs"}
    assert peaks[1] <= peaks[0]


def test_runs_are_one_call_where_padding_costs_less():
    """Of an LSTM that oneDNN runs; calls of others cost little."""
    single, double = (torch.empty(12, 64, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert in_calls("LSTM", SHORT, single, 32, True) == [SHORT]
    assert in_calls("LSTM", [(300, 8), (300, 1), (2, 0)], single, 32, True) == [[(300, 8)], [(300, 1), (2, 0)]]
    for kind, like in (("LSTM", double), ("GRU", single), ("LSTM", single.to("meta"))):
        assert in_calls(kind, SHORT, like, 32, True) == [[run] for run in SHORT]


def test_padding_is_exact_in_both_directions():
    """Also with a given initial state, with which padding could not keep h in the reverse direction."""
    layer, given = nn.LSTM(3, 16, 2, bidirectional=True).float(), packed(*range(20, 60, 3), dtype=torch.float32)
    state = [torch.randn(4, 14, 16, dtype=torch.float32, requires_grad=True) for _ in range(2)]
    for own, calls in (([], 1), (state, 14)):
        expected = everything(layer, given, *own)
        with gradfree.create_engine("shooting").attach(layer), gradfree.engine_figures() as figures:
            assert off_by(everything(layer, given, *own), expected) < 1e-5
        assert figures[""] == {"packed in runs": calls}


@pytest.mark.parametrize("bias", [-2e4, -torch.inf])
def test_weights_that_no_padding_outweighs_are_exact(bias):
    """No additional input opens a forget gate as closed as this one, or closes such an input gate."""
    layer, given = nn.LSTM(3, 16, bidirectional=True).float(), packed(*range(190, 202, 2), dtype=torch.float32)
    with torch.no_grad():
        layer.bias_ih_l0[16:32] = bias
        layer.bias_hh_l0_reverse[:16] = -bias
    expected = everything(layer, given)
    with gradfree.create_engine("shooting").attach(layer), gradfree.engine_figures() as figures:
        assert off_by(everything(layer, given), expected) < 1e-5
    assert layouts(figures) == {"packed in runs"}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@patch("gradfree.time.torch_layer_site.packed_layout", lambda *_, **__: "runs")
def test_autocast_gives_the_dtypes_of_torch(kind):
    layer, given = kind(3, 16).float(), packed(20, 12, 7, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = everything(layer, given)
        with gradfree.create_engine("shooting").attach(layer):
            found = everything(layer, given)
    assert [part.dtype for part in found] == [part.dtype for part in expected]


@pytest.mark.parametrize("engine", ["backprop", "shooting", "deeppcr", "dsf"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@patch("gradfree.time.torch_layer_site.packed_layout", lambda *_, **__: "grid")
def test_under_autocast_a_loss_may_be_on_the_final_state_only(kind, engine):
    layer, given = kind(3, 16).float(), packed(20, 12, 7, dtype=torch.bfloat16)
    with gradfree.create_engine(engine).attach(layer):
        with torch.autocast("cpu", torch.bfloat16):
            _, final = layer(given)
        torch.stack(final if isinstance(final, tuple) else (final,)).float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_products_of_jacobians_that_overflow_behind_the_end_do_not_count():
    layer, given = nn.RNN(3, 8).float(), packed(1000, 100, dtype=torch.float32)
    with torch.no_grad():
        layer.weight_hh_l0.copy_(1.5 * torch.linalg.qr(torch.randn(8, 8))[0])
        layer.bias_hh_l0.zero_()
        layer.bias_ih_l0.zero_()
    expected = everything(layer, given)
    with gradfree.create_engine("deeppcr").attach(layer):
        assert off_by(everything(layer, given), expected) < 1e-4


@pytest.mark.parametrize("sizes", [[3] * 60 + [1] * 60 + [2] * 60, [2] * 60 + [1] * 60 + [2] * 60])
def test_batches_that_grow_again_get_the_error_of_torch(sizes):
    layer, given = nn.LSTM(3, 16), PackedSequence(torch.randn(sum(sizes), 3), torch.tensor(sizes))
    with gradfree.create_engine("shooting").attach(layer), pytest.raises(RuntimeError, match="output with shape"):
        layer(given)
