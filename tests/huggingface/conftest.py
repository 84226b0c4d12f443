import pytest
import torch


@pytest.fixture(autouse=True)
def float32(float64):
    """As the Trainer's mixed precision has it."""
    torch.set_default_dtype(torch.float32)
