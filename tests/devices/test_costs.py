"""Cost rules of chains in time for cuDNN's kernels: estimates, tested without a GPU."""

import pytest
import torch

from gradfree.devices.costs import free_rows, segments_pay


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch):
    """Let the rules treat every device as one with cuDNN."""
    monkeypatch.setattr("gradfree.devices.costs.runs_cudnn", lambda device: True)


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "pays"),
    [
        ("GRU", (1, 16384, 64), torch.float32, True),
        ("GRU", (1, 16384, 160), torch.float32, True),
        ("GRU", (1, 16384, 512), torch.float32, True),
        ("GRU", (8, 4096, 256), torch.float32, True),
        ("LSTM", (256, 1024, 64), torch.float32, False),
    ],
)
def test_segments_pay_only_where_cudnn_leaves_capacity_unused(kind, shape, dtype, pays):
    batch, length, units = shape
    like = torch.empty(batch, units, dtype=dtype, device="meta")
    assert segments_pay(length, batch, free_rows(like, kind, fused=True), burn=32) is pays
