"""One of four ranks: two that share the blocks of a model, twice, each pair with half of the data, by DDP.

Writes whether the replicas are the same to the last bit after 20 steps, and how far they are off one process.
"""

import os
import sys
from datetime import timedelta

import torch
from rank_processes import leave
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from whole_ranks import made

import gradfree

RANK = int(os.environ.get("RANK", "0"))


def train(model, part):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(20):
        tokens = torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(step))[part]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        optimizer.step()


def main(folder):
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "blocks"))
    one, model = made(), made()
    train(one, slice(None))
    gradfree.layer_parallel(model, "highway_bp", mesh=mesh["blocks"], iterations=1)
    half = 2 * mesh["data"].get_local_rank()
    train(nn.parallel.DistributedDataParallel(model, process_group=mesh["data"].get_group()), slice(half, half + 2))
    expected = dict(one.named_parameters())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    off = max((p - expected[name]).abs().max().item() for name, p in weights.items())
    torch.save((weights, off), os.path.join(folder, f"{RANK}.pt"))
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
