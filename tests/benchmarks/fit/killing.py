"""A callback that kills its own process, in a module of its own: the command line imports it by name."""

import os
import signal

import lightning.pytorch as pl


class Kill(pl.Callback):
    """kill -9 when the batch after ``steps`` optimizer steps is there."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.steps:
            os.kill(os.getpid(), signal.SIGKILL)
