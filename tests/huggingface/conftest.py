import pytest
import torch


@pytest.fixture(autouse=True)
def float32(float64):
    """As in the Trainer's mixed precision."""
    torch.set_default_dtype(torch.float32)
