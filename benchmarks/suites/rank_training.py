"""Whether training on ranks comes to the accuracy of one process.

torchrun --nproc-per-node N -m gradfree.benchmarks.suites.rank_training

Residual MLPs on the digits, three seeds: one process with backpropagation, then the blocks on all ranks with k = 0 to
N - 1 sweeps. Prints the accuracies on held-out digits at the end.
"""

from __future__ import annotations

import torch
from torch import distributed, nn

import gradfree
from gradfree.benchmarks.data.bundled import Split, digits

EPOCHS, BATCH = 20, 64


def trained(model: nn.Module, data: Split) -> None:
    """Train a model, or this rank's part of it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    numbers = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(data.targets), generator=numbers).split(BATCH):
            loss = nn.functional.cross_entropy(model(data.inputs[batch].flatten(1)), data.targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: Split) -> float:
    """Return the share of the data that a model tells right."""
    return float((model(data.inputs.flatten(1)).argmax(1) == data.targets).double().mean())


def main() -> None:
    """Print a row for each way to train, a column for each seed."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    data = digits()
    for sweeps in (None, *range(ranks)):
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            model = gradfree.create_model("residual_mlp", in_features=64, num_classes=10, depth=16, width=64)
            if sweeps is not None:
                gradfree.layer_parallel(model, "highway_bp", iterations=sweeps)
            if sweeps is not None or rank == 0:
                trained(model, data.train)
                found.append(accuracy(model, data.test))
        if rank == 0:
            name = "one process, backpropagation" if sweeps is None else f"{ranks} ranks, k = {sweeps}"
            print(f"{name}: {', '.join(f'{a:.4f}' for a in found)}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
