"""Trains with ``auto`` on ranks with different times, and writes the choice and when the engine changed."""

import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from plain_modules import weights
from rank_processes import leave
from rank_scripts import QUIET, Module, loader

import gradfree.lightning
from gradfree.choosing.turns import Turns

TIMES = [[4.0, 1.0, 3.0, 2.0], [4.0, 3.5, 3.0, 2.0]]
"""Times by rank: the second candidate is fastest on rank 0; the last one has the smallest maximum over both."""


def main(folder):
    rank = int(os.environ["RANK"])
    Turns._drop_slowest = lambda self: None
    Turns.times = lambda self: TIMES[rank]
    torch.manual_seed(0)
    module = Module("time").double()
    trainer = pl.Trainer(
        strategy=gradfree.lightning.EngineDDPStrategy("auto"),
        devices=2,
        accelerator="cpu",
        precision="64-true",
        max_steps=52,
        **QUIET,
    )
    trainer.fit(module, loader(2))
    handle = trainer.strategy.handle
    torch.save((handle.chosen, handle.times, weights(module)), f"{folder}/{rank}.pt")
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    main(sys.argv[1])
