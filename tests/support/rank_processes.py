"""Scripts that run as the ranks of one process group, as under torchrun, and what they leave behind.

They are called as ``python SCRIPT FOLDER`` with the environment of torchrun, and write what they find to
FOLDER/<rank>.pt. Their processes are forked from one that has imported what is slow to import.
"""

import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path
from tempfile import mkstemp

import torch

_SERVER = multiprocessing.get_context("forkserver")
# The first optimizer imports Dynamo.
_SERVER.set_forkserver_preload(["gradfree.testing.cases.models", "pytest", "torch._dynamo"])


class Rank:
    """A process that runs a script.

    Args:
        script: its path.
        arguments: behind the path.
        environment: beside that of this process.
    """

    def __init__(self, script, arguments, environment):
        written, name = mkstemp()
        self._errors = os.fdopen(written)
        given = script, arguments, environment, name
        self._process = _SERVER.Process(target=_run, args=given, daemon=True)
        self._process.start()

    def ended(self, timeout):
        """Wait for its end; return its exit status and what it has written to stderr."""
        self._process.join(timeout)
        return self._process.exitcode, self._errors.read()

    def is_alive(self):
        """Tell whether it has not ended."""
        return self._process.is_alive()

    def kill(self):
        """End it, whatever it does."""
        self._process.kill()
        self._process.join()


def start_ranks(script, *arguments, ranks=2):
    """Start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
    of_rank = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [Rank(str(script), [str(argument) for argument in arguments], own) for own in of_rank]


def results_of_ranks(folder, script, ranks=2):
    """Return what each rank of ``script`` has written."""
    for rank in start_ranks(script, folder, ranks=ranks):
        status, errors = rank.ended(timeout=300)
        assert status == 0, errors
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def leave():
    """End together: gloo's threads abort a process that ends while another still talks to it."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _run(script, arguments, environment, errors):
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    os.unlink(errors)
    os.environ |= environment
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    # Several ranks share a core: threads that wait for each other would take it from those that work.
    torch.set_num_threads(1)
    runpy.run_path(script, run_name="__main__")
