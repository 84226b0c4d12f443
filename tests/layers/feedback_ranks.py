"""Trains with each kind of feedback on this rank's half of the batches, under DDP and under FSDP2 around each block."""

import sys
from functools import partial
from pathlib import Path

import torch
from rank_processes import leave
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import gradfree

FEEDBACK = ("random", "sign", "usf", "brsf", "frsf", "learned")


def net():
    torch.manual_seed(0)
    linear = partial(nn.Linear, dtype=torch.float64)
    blocks = [nn.Sequential(linear(6, 8), nn.Tanh(), linear(8, 6)) for _ in range(2)]
    return nn.Sequential(linear(5, 6), *blocks, linear(6, 3))


def train(model, share, feedback, steps):
    """Return all weights and the feedback after ``steps`` steps with halves of the same batches."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    engine = gradfree.create_engine("fa", feedback=feedback)
    with engine.attach(model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model) as handle:
        for batch in torch.randn(steps, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)):
            optimizer.zero_grad()
            model(batch[share]).pow(2).mean().backward()
            optimizer.step()
        kept = handle.state_dict().get("", {})
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()], kept


def sharded():
    model = net()
    for block in list(model)[1:3]:
        fully_shard(block)
    return fully_shard(model)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    mine = slice(4 * rank, 4 * rank + 4)
    found = {
        feedback: (
            train(nn.parallel.DistributedDataParallel(net()), mine, feedback, 20),
            train(sharded(), mine, feedback, 3),
        )
        for feedback in FEEDBACK
    }
    torch.save(found, Path(sys.argv[1]) / f"{rank}.pt")
    leave()
