"""A few optimizer steps on a case in a plain loop: the reference for Lightning and for several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.chains.handle import Handle
from gradfree.engines.engine import Engine
from gradfree.testing.cases.cases import ModelCase, Specimen
from gradfree.torchside.sharding import whole

STEPS = 6
Updates = dict[str, Tensor]


def batches(specimen: Specimen) -> Iterator[Tensor]:
    """Yield a batch for each step."""
    for step in range(STEPS):
        yield specimen.x * (1.0 + step / STEPS)


def loss_of(out: Tensor) -> Tensor:
    """Return the mean over the samples."""
    return out.pow(2).mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all loops."""
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def updates_of(specimen: Specimen) -> Updates:
    """Return the change of each weight by name; sharded weights are gathered."""
    # Lightning moves the model back to the CPU.
    return {
        name: whole(p.detach()).to(specimen.x.device) - specimen.start[name]
        for name, p in specimen.model.named_parameters()
    }


def attached_inside(engine: Engine, specimen: Specimen) -> Handle:
    """Attach to the model as module ``net`` of another one, as in Lightning: random numbers may depend on the path."""
    return engine.attach(nn.ModuleDict({"net": specimen.model}), [f"net.{path}" for path in specimen.chains])


def train(
    engine: Engine,
    case: ModelCase,
    dtype: torch.dtype = torch.float64,
    clip: float = 0.0,
    accumulate: int = 1,
    epochs: int = 1,
    low: Any = None,
    steps: int = STEPS,
) -> Updates:
    """Return the change of the weights over all steps.

    Args:
        engine: the engine to attach.
        case: the model.
        dtype: dtype of the weights.
        clip: maximal norm of the gradients; 0 for no clipping.
        accumulate: number of batches for one step of the optimizer.
        epochs: passes over the batches.
        low: dtype of autocast, if any.
        steps: number of batches of an epoch that are used.
    """
    specimen = Specimen(case, dtype)
    with attached_inside(engine, specimen):
        optimizer = optimizer_of(specimen.model)
        for number, x in enumerate([*batches(specimen)][:steps] * epochs, 1):
            with torch.autocast(specimen.x.device.type, low) if low else nullcontext():
                loss = loss_of(specimen.model(x))
            (loss / accumulate).backward()
            if number % accumulate == 0:
                if clip:
                    nn.utils.clip_grad_norm_(specimen.model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        return updates_of(specimen)
