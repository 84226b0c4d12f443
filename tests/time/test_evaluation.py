"""Evaluation: without gradients, engines with sweeps run torch's layers as in training, to the same tolerance."""

import warnings
from unittest.mock import patch

import pytest
import torch
from oracles import off_by
from recurrent_tasks import remembering
from torch import nn

import gradfree
from gradfree.benchmarks.timing.allocations import allocations
from gradfree.segments import segmented_passes

LAYERS = {
    "GRU, two layers, both directions": lambda: nn.GRU(3, 8, 2, bidirectional=True, dropout=0.5),
    "GRU, batch first": lambda: nn.GRU(3, 8, batch_first=True),
    "LSTM": lambda: nn.LSTM(3, 8),
    "RNN, no bias": lambda: nn.RNN(3, 8, bias=False),
}


@pytest.fixture
def cut():
    """The calls that ran in segments."""
    with patch.object(segmented_passes, "solve_borders", wraps=segmented_passes.solve_borders) as calls:
        yield calls


def outputs(layer, *given):
    out, final = layer(*given)
    return [out, *(final if isinstance(final, tuple) else [final])]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_and_final_states_are_torchs_to_the_tolerance(layer, mode, cut):
    layer = LAYERS[layer]().eval()
    x = torch.randn(1, 1030, 3) if layer.batch_first else torch.randn(1030, 1, 3)
    parts = 2 if isinstance(layer, nn.LSTM) else 1
    state = tuple(torch.randn(layer.num_layers * (1 + layer.bidirectional), 1, 8) for _ in range(parts))
    with mode():
        given = x, state if parts == 2 else state[0]
        expected = outputs(layer, *given)
        with gradfree.create_engine("shooting").attach(layer):
            assert off_by(outputs(layer, *given), expected) < 1e-10
            single = [part.flatten() for part in outputs(layer, x.flatten(0, 1))]
            assert off_by(single, [part.flatten() for part in outputs(layer, x)]) < 1e-10
    assert cut.call_count >= 3 * layer.num_layers


@torch.no_grad()
def test_newton_sweeps_in_evaluation_if_asked():
    layer, x = nn.GRU(3, 8), torch.randn(200, 2, 3)
    expected = outputs(layer, x)
    with gradfree.create_engine("newton", max_sweeps=60).attach(layer):
        found = outputs(layer, x)
        assert 0.0 < off_by(found, expected) < 1e-10


@torch.no_grad()
def test_evaluation_learns_and_shares_what_it_learns_with_training(cut):
    """A failure is remembered: the layer runs as torch's for 50 calls, in evaluation and in training."""
    layer, x = remembering(12.0), torch.randn(2048, 1, 3)
    expected = outputs(layer, x)
    with gradfree.create_engine("shooting").attach(layer):
        with pytest.warns(UserWarning, match=r"has long memory: after \d+ sweeps the forward pass was still off by"):
            assert off_by(outputs(layer, x), expected) < 1e-10
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(50):
                assert all(map(torch.equal, outputs(layer, x), expected))
        assert cut.call_count == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs(layer, x)
        assert cut.call_count == 2
        with torch.enable_grad():
            layer(x)
        assert cut.call_count == 2


@torch.no_grad()
@pytest.mark.parametrize("case", ["turned off", "an approximate engine", "short", "exported", "single precision LSTM"])
def test_other_evaluation_is_bitwise_torchs(case, cut):
    layer, x = nn.GRU(3, 8).eval(), torch.randn(1024, 1, 3)
    engine = gradfree.create_engine("shooting", evaluation=case != "turned off")
    if case == "an approximate engine":
        engine = gradfree.create_engine("highway_bp")
    elif case in ("short", "exported"):
        engine, x = gradfree.create_engine("shooting", segments=4), x[: 63 if case == "short" else 128]
    elif case == "single precision LSTM":
        layer, x = nn.LSTM(3, 8).float().eval(), x.float()
    expected = outputs(layer, x)
    with engine.attach(layer):
        run = torch.export.export(layer, (x,), strict=False).module() if case == "exported" else layer
        assert all(map(torch.equal, outputs(run, x), expected))
    assert not cut.called


@torch.no_grad()
def test_nothing_is_kept_between_calls():
    layer, x = nn.GRU(3, 8), torch.randn(1024, 1, 3)
    with gradfree.create_engine("shooting").attach(layer):
        for _ in range(3):
            layer(x)
        kept = allocations(lambda: layer(x))
    assert sum(kept) <= 8 * (1024 + 1) * 8 + 64


@torch.no_grad()
def test_sequences_with_resets_are_cut_between_them(cut):
    layer, x = nn.GRU(3, 8), torch.randn(1500, 2, 3)
    resets = torch.zeros(1500, 2, dtype=torch.bool)
    resets[20, 1] = True
    expected, final = gradfree.run_with_resets(layer, x, None, resets)
    with gradfree.create_engine("shooting").attach(layer):
        assert off_by(gradfree.run_with_resets(layer, x, None, resets), [expected, final]) < 1e-10
    assert cut.called


def test_an_optimizer_with_an_engine_evaluates_between_its_steps(cut):
    layer, x = nn.GRU(3, 8), torch.randn(1100, 1, 3)
    optimizer = gradfree.EngineOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), layer, engine="shooting")
    layer(x)[0].sum().backward()
    optimizer.step()
    trained = cut.call_count
    with torch.inference_mode():
        found = outputs(layer, x)
    assert cut.call_count == trained + 1
    optimizer.detach()
    with torch.no_grad():
        assert off_by(found, outputs(layer, x)) < 1e-10
