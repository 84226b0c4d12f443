"""Helpers for scripts that train as one of WORLD_SIZE ranks."""

import os
from collections import OrderedDict

import torch
from plain_modules import Net, PlainModule, samples
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

SAMPLES = 8
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "limit_val_batches": 0,
}


class Module(PlainModule):
    def forward(self, x):
        return self.net(x)


def create_net(kind):
    """Return the net at the same path as in a LightningModule, since random feedback depends on the path."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(net=Net(kind))).double()


def loader(devices):
    """Return this rank's batches; those of all ranks together are the batches of one device."""
    sampler = DistributedSampler(samples(), devices, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(samples(), SAMPLES // devices, sampler=sampler)


def optimizer(net):
    """Return the state of the Module."""
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
