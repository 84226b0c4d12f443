"""What scripts share that train as one rank of as many as WORLD_SIZE says, and how tests run them.

They are called as ``python SCRIPT FOLDER`` with the environment of torchrun, and write what they find to
FOLDER/<rank>.pt.
"""

import os
import socket
import subprocess
import sys
from collections import OrderedDict

import torch
from places import SUPPORT
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
    """Return the net at the path that it has in a LightningModule, too: random feedback depends on the path."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(net=Net(kind))).double()


def loader(devices):
    """Return the batches of this rank, which together make up those of one device."""
    sampler = DistributedSampler(samples(), devices, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(samples(), SAMPLES // devices, sampler=sampler)


def optimizer(net):
    """Return that of the Module."""
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def results_of_ranks(folder, script):
    """Return what each of two ranks of ``script`` has written."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    command = [sys.executable, script, str(folder)]
    shared["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    environments = [os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    started = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for env in environments]
    for process in started:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def leave():
    """End together: gloo's threads abort a process that ends while another still talks to it."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
