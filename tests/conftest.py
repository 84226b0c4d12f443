from collections.abc import Iterator

import pytest
import torch

# The tensors are tiny, and threads that wait for each other make a busy machine crawl.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Every test starts from the same random numbers, and computes in float64 unless it says otherwise."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
