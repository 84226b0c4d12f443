"""Trains with a running mean of gates in Lightning, stopped and not.

Writes the weights at the end of the whole run and of the resumed one, and what the engine remembers
behind each step of both.
"""

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

STEPS, STOP = 6, 3


class Remembered(pl.Callback):
    def __init__(self):
        self.states = []

    def on_train_batch_end(self, trainer, *args):
        self.states.append(trainer.strategy.handle.state_dict())


def in_lightning(folder):
    def fitted(steps, ckpt_path=None):
        torch.manual_seed(0)
        module, remembered = Module("time").double(), Remembered()
        trainer = pl.Trainer(
            strategy=gradfree.lightning.EngineDDPStrategy("dsf", feedback="gate"),
            devices=2,
            accelerator="cpu",
            precision="64-true",
            max_epochs=steps // STOP,
            limit_train_batches=STOP,
            callbacks=[remembered],
            enable_checkpointing=False,
            **QUIET,
        )
        trainer.fit(module, loader(2), ckpt_path=ckpt_path)
        return trainer, weights(module), remembered.states

    stopped, *_ = fitted(STOP)
    stopped.save_checkpoint(f"{folder}/lightning.ckpt")
    return fitted(STEPS)[1:], fitted(STEPS, f"{folder}/lightning.ckpt")[1:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    torch.save(in_lightning(sys.argv[1]), f"{sys.argv[1]}/{os.environ['RANK']}.pt")
    leave()
