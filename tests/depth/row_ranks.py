"""Trains rows without hooks on each rank, with DDP and FSDP2; writes weights and which blocks ran with hooks."""

import os
import sys

import torch
import torch.distributed as dist
from rank_processes import leave
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradfree
from gradfree.depth.recorder import BlockRecorder
from gradfree.testing.cases.models import Plain

STEPS, LENGTH, RANKS = 4, 5, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.Sequential(*(Plain() for _ in range(LENGTH)))
        self.double()

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def mesh():
    return init_device_mesh("cpu", (RANKS,))


def replicated(model):
    return DistributedDataParallel(model)


def replicated_in_buckets(model):
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1e-3)


def sharded(model):
    return fully_shard(model, mesh=mesh())


def sharded_again_between_the_passes(model):
    return fully_shard(model, mesh=mesh(), reshard_after_forward=True)


def sharded_in_parts(model):
    fully_shard(model.blocks, mesh=mesh())
    return fully_shard(model, mesh=mesh())


WAYS = (replicated, replicated_in_buckets, sharded, sharded_again_between_the_passes, sharded_in_parts)


def trained(wrap, rows):
    """Return the weights after some steps on these rows of the batches, and the blocks whose hooks ran last."""
    torch.manual_seed(0)
    model = Net()
    batches = torch.randn(STEPS, 4, 6, dtype=torch.float64)
    seen, enter = [], BlockRecorder.enter
    BlockRecorder.enter = lambda self, *call: (torch.is_grad_enabled() and seen.append(self.path)) or enter(self, *call)
    try:
        wrapped = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        with gradfree.create_engine("highway_bp", iterations=LENGTH).attach(model, ["blocks"], batched=True):
            for x in batches:
                seen.clear()
                optimizer.zero_grad()
                wrapped(x[rows]).square().mean().backward()
                optimizer.step()
    finally:
        BlockRecorder.enter = enter
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in weights]), seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own = slice(dist.get_rank(), None, RANKS)
    found = {way.__name__: trained(way, own) for way in WAYS}
    found["one process"] = trained(lambda model: model, slice(None))
    torch.save(found, f"{sys.argv[1]}/{os.environ['RANK']}.pt")
    leave()
