"""Scripts that run as the ranks of one process group, as under torchrun, and their results.

They are called as ``python SCRIPT FOLDER`` with the environment of torchrun, and write their results to
FOLDER/<rank>.pt.
"""

import torch
from forked_scripts import Script


def start_ranks(script, *arguments, ranks=2):
    """Start the ranks; the store outlives each of them, as with torchrun."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    of_rank = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    started = [Script(script, *arguments, environment=own) for own in of_rank]
    started[0].store = store
    return started


def run_ranks(script, *arguments, ranks=2):
    """Run the ranks and assert that all succeed; if one fails, kill the others."""
    started = start_ranks(script, *arguments, ranks=ranks)
    try:
        for rank in started:
            status, said = rank.ended()
            assert status == 0, said
    finally:
        for rank in started:
            rank.kill()


def results_of_ranks(folder, script, ranks=2):
    """Return the results of each rank of ``script``."""
    run_ranks(script, folder, ranks=ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def leave():
    """Wait for all ranks, then end: gloo's threads abort a process that ends while another communicates with it."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
