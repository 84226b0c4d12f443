"""What is refused of models on ranks before a message is sent."""

import copy

import pytest
import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree.errors import ChainError


def test_checkpoints_transforms_and_copies_of_the_whole_model_are_refused(tmp_path):
    if distributed.is_initialized():  # By another test.
        distributed.destroy_process_group()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, x = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))), torch.randn(4, 2)
        gradfree.layer_parallel(model, "backprop", chains=[list("012")])
        with pytest.raises(ChainError, match="Put checkpoints inside of the model"):
            checkpoint(model, x, use_reentrant=False)
        with pytest.raises(ChainError, match="the model runs inside a transform"):
            torch.func.grad(lambda x: model(x).sum())(x)
        with pytest.raises(ChainError, match="Copy it first, then call layer_parallel"):
            copy.deepcopy(model)
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        distributed.destroy_process_group()
