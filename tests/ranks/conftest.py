"""A process group of one rank, for tests that need no second one."""

import pytest
import torch


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
