"""One of four ranks: two pairs that split a model's blocks, each with half of the data, by DDP or FSDP2.

Writes the weights after 20 steps, and how far they are off one process.
"""

import os
import sys
from datetime import timedelta
from functools import partial

import torch
from rank_processes import leave
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradfree
from gradfree.testing.cases.models import Plain
from gradfree.torchside.sharding import whole

RANK = int(os.environ.get("RANK", "0"))


def sharing():
    """Some of its six blocks share weights with others on the same rank."""
    torch.manual_seed(0)
    model = Tokens()
    for i in (0, 3):
        model.blocks[i + 1].linear.weight = model.blocks[i].linear.weight
    return model


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList([Plain() for _ in range(6)])
        self.head = nn.Linear(6, 13)

    def forward(self, tokens):
        state = self.embedding(tokens)
        for block in self.blocks:
            state = block(state)
        return self.head(state)


def train(model, part, clip):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(20):
        tokens = torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(step))[part]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        clip(0.1)
        optimizer.step()


def ddp(model, mesh):
    return nn.parallel.DistributedDataParallel(model, process_group=mesh["data"].get_group())


def fsdp(model, mesh):
    return fully_shard(model, mesh=mesh["data"])


def main(folder):
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "blocks"))
    found = {}
    half = 2 * mesh["data"].get_local_rank()
    for share in (ddp, fsdp):
        one, model = sharing(), sharing()
        train(one, slice(None), partial(nn.utils.clip_grad_norm_, list(one.parameters())))
        stage = gradfree.layer_parallel(model, "highway_bp", mesh=mesh["blocks"], iterations=1)
        train(share(model, mesh), slice(half, half + 2), stage.clip_grad_norm_)
        expected, weights = one.state_dict(), stage.state_dict()
        errors = [(value - expected[name]).abs().max() for name, value in weights.items()]
        # Python's max would pass over a NaN.
        off = torch.stack(errors).max().item() if errors else None
        found[share.__name__] = (
            {name: whole(p.detach()) for name, p in model.named_parameters()},
            len(weights),
            off,
        )
    torch.save(found, os.path.join(folder, f"{RANK}.pt"))
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
