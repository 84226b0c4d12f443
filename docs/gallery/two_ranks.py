"""One model on two ranks, whose backward passes run at the same time: Highway-BP between them, exact at k = 1."""

import tempfile
import time

import torch
import torch.multiprocessing
from drawing import SHORT, save

import gradfree

STEPS, DEPTH, WIDTH = (2, 4, 16) if SHORT else (40, 32, 256)


def build():
    torch.manual_seed(0)
    return gradfree.create_model("residual_mlp", in_features=64, num_classes=10, depth=DEPTH, width=WIDTH)


def train(model):
    """Return the seconds so far and the loss after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, curve, start = torch.Generator().manual_seed(0), [], time.perf_counter()
    images = torch.randn(64, 64, generator=generator)
    labels = torch.randint(10, (64,), generator=generator)
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append((time.perf_counter() - start, loss.item()))
    return curve


def on_rank(rank, store, results):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = build()
    gradfree.layer_parallel(model, "highway_bp", iterations=1)
    results[rank] = train(model)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    curves = {"one process": train(build())}
    with tempfile.TemporaryDirectory() as folder, torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(on_rank, (f"{folder}/store", results), nprocs=2)
        curves["two ranks, k = 1"] = results[0]
    save("Layers on two ranks: the same losses", curves, "seconds", "loss")
