"""Rules of cost for chains in time, as they are for cuDNN's kernels: estimates, tried where there is no GPU."""

import pytest
import torch
from oracles import off_by
from torch import nn

import gradfree
from gradfree.devices.costs import kernel_cost, segments_pay
from gradfree.time import forward


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch):
    """Rules take every device for one with cuDNN."""
    monkeypatch.setattr("gradfree.devices.costs.runs_cudnn", lambda device: True)


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "pays"),
    [
        ("GRU", (1, 16384, 64), torch.float32, True),
        ("GRU", (1, 16384, 160), torch.float32, True),
        ("GRU", (1, 16384, 512), torch.float32, True),
        ("GRU", (8, 4096, 256), torch.float32, True),
        ("LSTM", (256, 1024, 64), torch.float32, False),
        ("LSTM", (16, 1024, 768), torch.float16, False),
        ("LSTM", (17, 1024, 768), torch.float16, True),
    ],
)
def test_segments_pay_where_cudnn_leaves_something_to_gain(kind, shape, dtype, pays):
    batch, length, units = shape
    like = torch.empty(batch, units, dtype=dtype, device="meta")
    assert segments_pay(length, batch, kernel_cost(like, kind), burn=32) is pays


@pytest.mark.parametrize(("units", "packed"), [(128, False), (160, True), (192, True), (208, False)])
def test_segments_are_packed_where_a_larger_batch_would_slow_cudnn_down(units, packed, monkeypatch):
    torch.set_default_dtype(torch.float32)
    rnn, x, kernel, given = nn.RNN(4, units), torch.randn(256, 1, 4), torch._VF.rnn_tanh, []

    def watched(data, sizes_or_state, state_or_weights, *rest):
        given.append(isinstance(state_or_weights, torch.Tensor))
        return kernel(data, sizes_or_state, state_or_weights, *rest)

    with torch.no_grad():
        rnn.weight_hh_l0.mul_(0.5)
    expected = rnn(x)[0]
    monkeypatch.setitem(forward._KERNELS, "RNN_TANH", watched)
    with gradfree.create_engine("shooting", segments=16).attach(rnn):
        out, _ = rnn(x)
        out.sum().backward()
    assert off_by([out], [expected]) < 1e-4
    assert set(given) == {packed}
