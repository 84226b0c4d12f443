"""Trains models sharded by FSDP2 with every engine, and as one process does; writes the weights and the errors."""

import logging
import os
import sys
import warnings
from itertools import islice

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from plain_modules import samples
from rank_processes import leave
from rank_scripts import QUIET, SAMPLES, Module, create_net, loader, optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradfree
import gradfree.lightning

STEPS = 5
OPTIONS = {
    "dsf": {"feedback": "linspace"},
    "foton": {"orthogonalize_every": 2},
    "highway_bp": {"iterations": 1},
}


def create_engine(name):
    return gradfree.create_engine(name, **OPTIONS.get(name, {}))


def trained(model, batches, handle=None):
    """Return all weights after some steps, with the engine's means averaged over ranks after each."""
    stepper = optimizer(model)
    for x, y in batches:
        stepper.zero_grad()
        nn.functional.cross_entropy(model(x.double()), y).backward()
        stepper.step()
        if handle is not None:
            handle.average_over_ranks()
    return weights(model)


def weights(model):
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def mine():
    """Return this rank's share of the batches."""
    return islice(loader(dist.get_world_size()), STEPS)


def one_process(name, kind):
    model = create_net(kind)
    with create_engine(name).attach(model):
        return trained(model, zip(*(x[: STEPS * SAMPLES].split(SAMPLES) for x in samples().tensors), strict=True))


def sharded_in_parts(name, kind):
    """Shard the chain as a whole, and the modules around it."""
    model = create_net(kind)
    for part in (model.net.stem, model.net.middle):
        fully_shard(part, mesh=mesh())
    fully_shard(model, mesh=mesh())
    with create_engine(name).attach(model) as handle:
        return trained(model, mine(), handle)


class Sharded(Module):
    """Shards its net in ``configure_model``, in float64, which Lightning's strategy does not support by itself."""

    def training_step(self, batch, index):
        x, y = batch
        return super().training_step((x.double(), y), index)

    def configure_model(self):
        if not isinstance(self.net, torch.distributed.fsdp.FSDPModule):
            fully_shard(self.net.double(), mesh=self.device_mesh["data_parallel"])


def in_lightning(name, kind):
    torch.manual_seed(0)
    module, size = Sharded(kind), {"data_parallel_size": dist.get_world_size(), "tensor_parallel_size": 1}
    base = pl.strategies.ModelParallelStrategy
    trainer = pl.Trainer(
        strategy=gradfree.lightning.engine_strategy(create_engine(name), base=base, **size),
        devices=dist.get_world_size(),
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=STEPS,
        enable_checkpointing=False,
        **QUIET,
    )
    trainer.fit(module, loader(dist.get_world_size()))
    return weights(module)


NETS = (("highway_bp", "blocks"), ("foton", "layers"), ("dsf", "time"))
"""Engines and kinds of nets; ``fully_shard(model)`` itself is a feature that all engines are tried with."""
RUNS = dict.fromkeys(NETS, (sharded_in_parts, in_lightning))


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def all_runs():
    """Return the weights after training by engine, kind of net and name of the run."""
    return {net: {run.__name__: run(*net) for run in (one_process, *runs)} for net, runs in RUNS.items()}


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.middle = gradfree.CellLayer(nn.GRUCell(6, 8))

    def forward(self, x):
        return self.middle(x.unsqueeze(0))[0]


def refusals():
    """Return the errors if a module inside a chain is sharded, before or after attaching."""
    makes = {
        "a block": (lambda: create_net("blocks"), lambda model: model.net.middle[1]),
        "a part of a block": (lambda: create_net("blocks"), lambda model: model.net.middle[2].branch),
        "a cell": (lambda: Cells().double(), lambda model: model.middle.cell),
    }
    found = {}
    for what, (make, part) in makes.items():
        engine = gradfree.create_engine("fixed_point")
        model = make()
        fully_shard(part(model), mesh=mesh())
        found[what, "before"] = "\n".join(engine.validate(model).problems)
        model = make()
        with engine.attach(model):
            fully_shard(part(model), mesh=mesh())
            try:
                model(torch.randn(2, 6, dtype=torch.float64))
            except gradfree.ChainError as error:
                found[what, "after"] = str(error)
    return found


def comparison():
    """Return the error of a comparison while parameters are not whole."""
    model = fully_shard(create_net("blocks"), mesh=mesh(), reshard_after_forward=True)
    batch = torch.randn(2, 6, dtype=torch.float64), torch.tensor([0, 1])
    try:
        gradfree.gradient_fidelity(create_engine("highway_bp"), model, nn.functional.cross_entropy, batch)
    except gradfree.ChainError as error:
        return str(error)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    dist.init_process_group("gloo")
    found = {"runs": all_runs(), "refusals": refusals(), "comparison": comparison()}
    torch.save(found, f"{sys.argv[1]}/{os.environ['RANK']}.pt")
    leave()
