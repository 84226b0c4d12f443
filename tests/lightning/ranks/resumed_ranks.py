"""Trains with a running mean of gates, stopped and not, in Lightning and in Fabric.

Writes, by framework, the weights at the end of the whole run and of the resumed one, and what the engine remembers
behind each step of both.
"""

import logging
import os
import sys
import warnings
from itertools import islice

import lightning.fabric
import lightning.pytorch as pl
import torch
from plain_modules import weights
from rank_processes import leave
from rank_scripts import QUIET, Module, loader, optimizer
from torch import nn

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


def in_fabric(folder):
    def fitted(first, last, load=None, save=None):
        torch.manual_seed(0)
        strategy = gradfree.lightning.engine_strategy(
            "dsf", base=lightning.fabric.strategies.DDPStrategy, feedback="gate"
        )
        fabric = lightning.fabric.Fabric(strategy=strategy, devices=2, accelerator="cpu", precision="64-true")
        fabric.launch()
        module, states = Module("time").double(), []
        wrapped, stepper = fabric.setup(module, optimizer(module))
        if load:
            fabric.load(load, {"model": wrapped, "optimizer": stepper})
        for x, y in islice(loader(2), first, last):
            stepper.zero_grad()
            fabric.backward(nn.functional.cross_entropy(wrapped(x.double()), y))
            stepper.step()
            states.append(strategy.handles[0].state_dict())
        if save:
            fabric.save(save, {"model": wrapped, "optimizer": stepper})
        return weights(module), states

    fitted(0, STOP, save=f"{folder}/fabric.ckpt")
    return fitted(0, STEPS), fitted(STOP, STEPS, load=f"{folder}/fabric.ckpt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    found = {run.__name__: run(sys.argv[1]) for run in (in_lightning, in_fabric)}
    torch.save(found, f"{sys.argv[1]}/{os.environ['RANK']}.pt")
    leave()
