"""One of three ranks, of which the second fails in the given way while the others wait for it.

python failing_ranks.py FOLDER WAY: writes the error of each rank that survives.
"""

import os
import signal
import sys
from datetime import timedelta

import torch
from torch import distributed, nn

import gradfree
from gradfree.errors import ChainError
from gradfree.testing.cases.models import Plain, plain_model

RANK = int(os.environ.get("RANK", "0"))
# Long enough for fifteen processes on two busy cores.
TIMEOUT = timedelta(seconds=15)


class Failing(Plain):
    """Fails in the second pass, forward or backward."""

    way, passes = "", 0

    def forward(self, x):
        self.passes += 1
        if self.passes == 2 and self.way in WAYS:
            WAYS[self.way]()
        out = super().forward(x)
        if self.passes == 2 and self.way == "nan":
            out = Nan.apply(out)
        if self.passes == 2 and self.way == "killed in backward":
            out = Killed.apply(out)
        if self.passes == 2 and self.way == "ends in backward":
            out = Fails.apply(out)
        return out


class Nan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * float("nan")


class Killed(Nan):
    @staticmethod
    def backward(ctx, cotangent):
        os.kill(os.getpid(), signal.SIGKILL)


class Fails(Nan):
    @staticmethod
    def backward(ctx, cotangent):
        fail()


def fail():
    raise ValueError("the block's own error")


WAYS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": signal.pause,
    "raises": fail,
}


def main(folder, way):
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=180))
    torch.manual_seed(0)
    model = plain_model()
    model.blocks[3] = Failing()
    if RANK == 1:
        model.blocks[3].way = way
    options = {"iterations": 2 if way == "another engine" and RANK == 1 else 1}
    if way == "another model" and RANK == 1:
        model.blocks[0] = Plain(bias=False)
    if way == "no residual path":
        model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)])
    # No timeout here: the others must raise as soon as the rank has ended.
    impatient = distributed.new_group(timeout=None if way in ("raises", "ends in backward") else TIMEOUT)
    distributed.barrier()
    said = ""
    try:
        gradfree.layer_parallel(model, "highway_bp", mesh=impatient, chains=["blocks"], **options)
        with torch.autograd.set_detect_anomaly(way == "nan", check_nan=False):
            for _ in range(3):
                loss = model(torch.randn(4, 6)).sum()
                (2 * loss if way == "another loss" and RANK == 1 else loss).backward()
    except (ChainError, ValueError) as error:
        said = f"{'ChainError' if isinstance(error, ChainError) else 'ValueError'}: {error}"
    torch.save(said, os.path.join(folder, f"{RANK}.part"))
    os.rename(os.path.join(folder, f"{RANK}.part"), os.path.join(folder, f"{RANK}.pt"))
    # An error ends the process. The other ranks notice when the processes that wait for others end, too.
    if way == "raises" or (way == "ends in backward" and RANK == 1):
        os._exit(1)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
