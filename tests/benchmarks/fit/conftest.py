import pytest
import torch


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Checkpoints and logs go to a folder of their own; numbers are those of the command line."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    # Lightning puts the seed there.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
