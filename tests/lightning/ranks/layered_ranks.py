"""One of four ranks: a Trainer with two copies of a model on two ranks each, another that resumes it on all four.

Writes what they have logged and hold, their checkpoints, and a step with a scaler that only one rank is to skip.
"""

import logging
import os
import sys
import warnings
from datetime import timedelta

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from plain_modules import PlainModule, samples
from rank_processes import leave
from rank_scripts import QUIET
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import SumMetric

import gradfree.lightning
from gradfree.errors import ChainError

OPTIONS = QUIET | {"use_distributed_sampler": True, "limit_val_batches": None, "num_sanity_val_steps": 0}
RANK = int(os.environ.get("RANK", "0"))


class Counting(PlainModule):
    """Counts its validation batches."""

    def __init__(self, batch_size=8):
        super().__init__("blocks", batch_size=batch_size)
        self.seen = SumMetric()

    def train_dataloader(self):
        """Return this device's share, in order; a sampler from Lightning would have another order."""
        share = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        sampler = DistributedSampler(samples(), shuffle=False, **share)
        return DataLoader(samples(), self.hparams.batch_size, sampler=sampler)

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.seen.update(len(batch[0]))
        self.log("seen", self.seen)
        self.log("total", float(len(batch[0])), reduce_fx="sum", sync_dist=True)


class WithLBFGS(Counting):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


def fitted(strategy, epochs, devices=4, copies=1, resume=None, kind=Counting, **options):
    """Return the Trainer and its logs."""
    torch.manual_seed(0)
    options = OPTIONS | {"precision": "64-true", "gradient_clip_val": 0.2} | options
    trainer = pl.Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_epochs=epochs, enable_checkpointing=False, **options
    )
    trainer.fit(kind(8 // copies), ckpt_path=resume)
    return trainer, {name: float(value) for name, value in trainer.callback_metrics.items()}


def on_ranks(stages, **options):
    return gradfree.lightning.LayerParallelStrategy("backprop", stages=stages, **options)


def skipping():
    """Return the scale before and after a step that overflows on one rank, and whether weights have changed."""

    class Overflowing(pl.Callback):
        def on_after_backward(self, trainer, module):
            self.before = [p.detach().clone() for p in module.parameters()]
            if RANK == 1:
                next(module.parameters()).grad.fill_(float("inf"))

        def on_train_batch_end(self, trainer, module, *_):
            self.moved = not all(map(torch.equal, self.before, module.parameters()))

    torch.set_default_dtype(torch.float32)
    overflowing = Overflowing()
    plugins = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    strategy = on_ranks(4)
    trainer, _ = fitted(
        strategy,
        1,
        precision=None,
        plugins=plugins,
        callbacks=[overflowing],
        limit_train_batches=1,
        limit_val_batches=0,
    )
    assert isinstance(trainer.precision_plugin.scaler, ShardedGradScaler)
    return trainer.precision_plugin.scaler.get_scale(), overflowing.moved


def refused(strategy, **options):
    try:
        fitted(strategy, 1, **options)
    except (ValueError, ChainError) as error:
        return str(error)


def main(folder):
    torch.set_default_dtype(torch.float64)
    found = {}
    trainer, found["two copies"] = fitted(on_ranks(2), 2, copies=2)
    held = [name for name, _ in trainer.lightning_module.named_parameters()]
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    resumed, found["resumed"] = fitted(on_ranks(4), 3, resume=f"{folder}/two.ckpt")
    resumed.save_checkpoint(f"{folder}/three.ckpt")
    found["tested"] = resumed.validate(resumed.lightning_module, verbose=False)[0]
    found["held"] = held, [name for name, _ in resumed.lightning_module.named_parameters()]
    found["stages"] = refused(on_ranks(3))
    found["weights outside"] = refused(on_ranks(4, model="net.middle"))
    averages = pl.callbacks.StochasticWeightAveraging(1e-2)
    found["averages"] = refused(on_ranks(4), callbacks=[averages])
    found["pruning"] = refused(on_ranks(4), callbacks=[pl.callbacks.ModelPruning("l1_unstructured", amount=0.1)])
    found["LBFGS"] = refused(on_ranks(4), kind=WithLBFGS, gradient_clip_val=None)
    found["sync_batchnorm"] = refused(on_ranks(4), sync_batchnorm=True)
    found["skipped"] = skipping()
    torch.save(found, f"{folder}/{RANK}.pt")
    leave()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    main(sys.argv[1])
