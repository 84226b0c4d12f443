"""Lightning callbacks that look at an engine while it trains."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, distributed

from gradfree.chains.solving import Figures, engine_figures
from gradfree.choosing.watching import GradientWatch
from gradfree.fidelity import Agreement, loss_fidelity
from gradfree.lightning.carriers import TrainerCarrier


class _Observer(pl.Callback):
    """Looks at the first backward pass of every few optimizer steps.

    Args:
        every_n_steps: optimizer steps from one look to the next; with accumulation, at the first batch.
        prog_bar: whether what it sees is shown in the progress bar.

    Raises:
        ValueError: ``every_n_steps`` below 1.
    """

    def __init__(self, every_n_steps: int = 100, prog_bar: bool = False):
        if every_n_steps < 1:
            raise ValueError(f"{type(self).__name__}: every_n_steps must be at least 1, not {every_n_steps}.")
        self.every_n_steps, self.prog_bar = every_n_steps, prog_bar
        self._seen = -1

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a strategy without an engine.

        Raises:
            TypeError: the Trainer's strategy carries no engine.
        """
        _carrier(self, trainer)
        self._seen = -1

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Look, if it is time to."""
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._seen:
            self._seen = step
            self._check(trainer, pl_module, loss)

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        raise NotImplementedError


class GradientFidelity(_Observer):
    """Logs now and then how close the engine's gradients come to exact backpropagation's on the same batch.

    Logs ``fidelity/cosine`` and ``fidelity/norm_ratio`` of all parameters, and of each layer with its module path
    behind; ``delta/cosine/<block>`` and ``delta/norm_ratio/<block>`` of the cotangents behind the blocks, or single
    layers, of chains; with ``fa``, ``feedback/cosine/<layer>`` of feedback weights and the layer's own. Compares on
    the graph of the training step itself, before it goes backward: the run is bit for bit the same as without. Costs
    two more backward passes at the steps that it looks at, and waits for the device then.

    Args:
        every_n_steps: optimizer steps from one comparison to the next; with accumulation, of the first batch.
        prog_bar: whether the total cosine is shown in the progress bar.

    Raises:
        ValueError: ``every_n_steps`` below 1.
    """

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        assert isinstance(trainer.strategy, TrainerCarrier)
        fidelity = loss_fidelity(loss, pl_module, trainer.strategy.handle)
        self._log(pl_module, "fidelity", "", fidelity.total, self.prog_bar)
        for what, agreements in (("fidelity", fidelity.layers), ("delta", fidelity.states)):
            for path, agreement in agreements.items():
                self._log(pl_module, what, f"/{path}", agreement, False)
        for path, cosine in fidelity.feedback.items():
            pl_module.log(f"feedback/cosine/{path}", cosine, on_step=True, on_epoch=False)

    def _log(self, pl_module: pl.LightningModule, what: str, where: str, agreement: Agreement, prog_bar: bool) -> None:
        pl_module.log(f"{what}/cosine{where}", agreement.cosine, on_step=True, on_epoch=False, prog_bar=prog_bar)
        pl_module.log(f"{what}/norm_ratio{where}", agreement.norm_ratio, on_step=True, on_epoch=False)


class WatchGradient(pl.Callback):
    """Watches the gradient that the engine approximates, and makes it better where its bias matters.

    :class:`gradfree.GradientWatch` in Lightning: what it sees is logged as ``watch/cosine``, what it has done is in the
    checkpoint, and ranks that train together act on the lowest cosine of them all.

    Args:
        every_n_steps: optimizer steps from one look to the next.
        least_cosine: below which it acts.
        rises: how often the engine takes its next better options before gradients are exact.

    Raises:
        TypeError: an option of another type, or a strategy without an engine.
        ValueError: an option out of range.
    """

    def __init__(self, every_n_steps: int = 100, least_cosine: float = 0.99, rises: int = 3):
        self.watch = GradientWatch(every_n_steps, least_cosine, rises)
        self._steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin, or go on."""
        self.watch.start(_carrier(self, trainer).handle)
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Look, if the optimizer has taken a step that is looked at."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step

        def lowest(cosine: float) -> float:
            if trainer.world_size == 1:
                return cosine
            of_all = torch.tensor(cosine, device=pl_module.device)
            distributed.all_reduce(of_all, distributed.ReduceOp.MIN)
            return of_all.item()

        cosine = self.watch.after_step(lowest)
        if cosine is not None:
            pl_module.log("watch/cosine", cosine, on_step=True, on_epoch=False)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been seen and done."""
        return self.watch.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.watch.load_state_dict(state_dict)


class EngineFigures(_Observer):
    """Logs now and then how the engine solves its chains; see :func:`gradfree.engine_figures`.

    Logs each figure that the engine has as ``engine/<figure>/<chain>``: ``engine/residual/net.blocks``. The run is bit
    for bit the same as without. Costs one more sweep a chain at the steps that it looks at, and never waits for the
    device.

    Args:
        every_n_steps: optimizer steps from one look to the next; with accumulation, at the first batch.
        prog_bar: whether the figures are shown in the progress bar.

    Raises:
        ValueError: ``every_n_steps`` below 1.
    """

    def __init__(self, every_n_steps: int = 100, prog_bar: bool = False):
        super().__init__(every_n_steps, prog_bar)
        self._collecting = ExitStack()
        self._figures: Figures = {}

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._figures = self._collecting.enter_context(engine_figures())

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the figures of the backward pass."""
        self._collecting.close()
        figures, self._figures = self._figures, {}
        for path, of_chain in figures.items():
            for name, figure in of_chain.items():
                where = f"engine/{name}/{path}".rstrip("/")
                pl_module.log(where, figure, on_step=True, on_epoch=False, prog_bar=self.prog_bar)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Ask no longer: the backward pass may have failed."""
        self._collecting.close()


def _carrier(callback: pl.Callback, trainer: pl.Trainer) -> TrainerCarrier:
    if isinstance(trainer.strategy, TrainerCarrier):
        return trainer.strategy
    raise TypeError(
        f"{type(callback).__name__} looks at an engine, but {type(trainer.strategy).__name__} carries none: use "
        "Trainer(strategy='<engine>')."
    )
