"""Trains with every engine, in Lightning and in Fabric, as one rank of as many as WORLD_SIZE says.

Accumulates over two batches, so that the ranks keep the first one's gradients to themselves (``no_sync``).

Called as ``python two_ranks.py FOLDER`` with the environment of torchrun; writes the weights of every run to
FOLDER/<rank>.pt.
"""

import logging
import os
import sys
import warnings
from collections import OrderedDict
from contextlib import nullcontext

import lightning.fabric
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradfree
import gradfree.lightning

SAMPLES, STEPS = 8, 20


class Net(nn.Module):
    """Layers with dropout off, residual blocks or a GRU in the middle: whatever the engine takes."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.stem = nn.Linear(6, 8)
        if kind == "layers":
            self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        elif kind == "blocks":
            self.middle = gradfree.create_model("residual_mlp", in_features=8, num_classes=8, depth=3, width=8)
        else:
            self.middle = nn.GRU(1, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        x = self.middle(x.unsqueeze(-1))[0][:, -1] if self.kind == "time" else self.middle(x)
        return self.head(x)


def create_net(kind):
    """Return the net at the path that it has in a LightningModule, too: random feedback depends on the path."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(net=Net(kind))).double()


def kinds(engine):
    """Return the kinds of nets that the engine can train."""
    return [kind for kind in ("layers", "blocks", "time") if gradfree.create_engine(engine).validate(Net(kind)).ok]


def data():
    torch.manual_seed(3)
    return TensorDataset(torch.randn(SAMPLES * STEPS, 6), torch.randint(3, (SAMPLES * STEPS,)))


def loader(devices):
    """Return the batches of this rank, which together make up those of one device."""
    sampler = DistributedSampler(data(), devices, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(data(), SAMPLES // devices, sampler=sampler)


def optimizer(net):
    return torch.optim.SGD(net.parameters(), 0.2, momentum=0.9)


class Module(pl.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.net = Net(kind)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return optimizer(self)


def lightning_run(strategy, kind, devices):
    torch.manual_seed(0)
    module = Module(kind).double()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        max_epochs=1,
        precision="64-true",
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        **quiet,
    )
    trainer.fit(module, loader(devices))
    return flat(module.net)


def fabric_run(strategy, kind, devices):
    fabric = lightning.fabric.Fabric(strategy=strategy, devices=devices, accelerator="cpu", precision="64-true")
    fabric.launch()
    net = create_net(kind)
    wrapped, stepper = fabric.setup(net, optimizer(net))
    for index, (x, y) in enumerate(loader(devices)):
        last = index % 2 == 1
        with nullcontext() if last or devices == 1 else fabric.no_backward_sync(wrapped):
            fabric.backward(nn.functional.cross_entropy(wrapped(x.double()), y) / 2)
        if last:
            stepper.step()
            stepper.zero_grad()
    return flat(net)


def flat(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def all_runs(devices):
    """Return the weights after training, by engine, kind of net and framework."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    suffix = "" if devices == 1 else "_ddp"
    return {
        (engine, kind, run.__name__): run(engine + suffix, kind, devices)
        for engine in gradfree.list_engines()
        for kind in kinds(engine)
        for run in (lightning_run, fabric_run)
    }


def leave():
    """End together: gloo's threads abort a process that ends while another still talks to it."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = all_runs(int(os.environ["WORLD_SIZE"]))
    torch.save(runs, f"{sys.argv[1]}/{os.environ['RANK']}.pt")
    leave()
