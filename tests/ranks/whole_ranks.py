"""One of three ranks that train a model with clipped gradients, save it, and resume as two; compared with one process.

Writes how far the whole model's weights are off, and whether the checkpoint is that of the one process.
"""

import os
import random
import sys
from datetime import timedelta

import numpy
import torch
from rank_processes import leave
from torch import distributed, nn

import gradfree
from gradfree.torchside.random_state import RandomState

RANK = int(os.environ.get("RANK", "0"))


def made(layers=3):
    torch.manual_seed(0)
    model = gradfree.create_model("gpt", vocab_size=13, context=5, layers=layers, width=6, heads=2)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    for layer in model.sublayers.modules():
        getattr(layer, "reset_parameters", lambda: None)()
    return model


class Scaled(nn.Module):
    """Draws from the generators of Python and numpy."""

    def forward(self, x):
        return x * (1 + random.random() + numpy.random.rand())  # noqa: NPY002


def optimizer_of(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() == 1]}]
    return torch.optim.AdamW(groups, 1e-2)


def train(model, optimizer, steps, clip):
    norms = []
    for step in steps:
        tokens = torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        norms.append(float(clip(0.1)))
        optimizer.step()
    return norms


def off(found, expected):
    """Return the largest difference of tensors and numbers between two states."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        return max((off(found[key], expected[key]) for key in expected), default=0.0)
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        return max((off(f, e) for f, e in zip(found, expected, strict=True)), default=0.0)
    if isinstance(expected, torch.Tensor):
        return (found - expected).abs().max().item()
    assert found == expected
    return 0.0


def refused(call, *args, **options):
    try:
        call(*args, **options)
    except gradfree.ChainError as error:
        return str(error)


def main(folder):
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    one = made()
    its = optimizer_of(one)
    found = {"norms": train(one, its, range(3), lambda most: nn.utils.clip_grad_norm_(one.parameters(), most))}
    torch.save((one.state_dict(), its.state_dict()), f"{folder}/one-{RANK}")
    train(one, its, range(3, 5), lambda most: nn.utils.clip_grad_norm_(one.parameters(), most))
    found["too few"] = refused(gradfree.layer_parallel, made(layers=1), "backprop", chains=["sublayers"])
    found["one rank's option"] = refused(gradfree.layer_parallel, made(), "highway_bp", residual=float(RANK))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), Scaled()) for _ in range(4)))
    gradfree.layer_parallel(model, "fixed_point", chains=[list("0123")])
    before, drawn = RandomState(), []
    for _ in range(2):
        drawn.append(model(torch.ones(2, 6)))
        drawn[-1].sum().backward()
    found["goes on as before"] = not before.has_drawn()
    found["draws anew in each pass"] = not torch.equal(*drawn)
    model = made()
    stage = gradfree.layer_parallel(model, "backprop")
    optimizer = optimizer_of(model)
    found["norms of ranks"] = train(model, optimizer, range(3), stage.clip_grad_norm_)
    checkpoint = stage.state_dict(), stage.optimizer_state_dict(optimizer)
    if RANK == 0:
        torch.save(checkpoint, f"{folder}/checkpoint")
        found["checkpoint"] = off(checkpoint, torch.load(f"{folder}/one-{RANK}"))
    distributed.barrier()
    two = distributed.new_group([0, 1])
    if RANK < 2:
        model = made()
        stage = gradfree.layer_parallel(model, "highway_bp", mesh=two, iterations=1)
        optimizer = optimizer_of(model)
        weights, kept = torch.load(f"{folder}/checkpoint")
        found["other keys"] = refused(stage.load_state_dict, weights | {"extra": weights["head.weight"]})
        stage.load_state_dict(weights)
        stage.load_optimizer_state_dict(optimizer, kept)
        train(model, optimizer, range(3, 5), stage.clip_grad_norm_)
        whole = stage.state_dict()
        if RANK == 0:
            found["resumed"] = off(whole, dict(one.state_dict()))
    torch.save(found, os.path.join(folder, f"{RANK}.pt"))
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
