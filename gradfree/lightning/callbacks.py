"""Lightning callbacks that look at an engine while it trains."""

from __future__ import annotations

from contextlib import ExitStack

import lightning.pytorch as pl
from torch import Tensor

from gradfree.chains.solving import Figures, engine_figures
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
        if not isinstance(trainer.strategy, TrainerCarrier):
            raise TypeError(
                f"{type(self).__name__} looks at an engine, but {type(trainer.strategy).__name__} carries none: use "
                "Trainer(strategy='<engine>')."
            )
        self._seen = -1

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Look, if it is time to."""
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._seen:
            self._seen = step
            self._look(trainer, pl_module, loss)

    def _look(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        raise NotImplementedError


class GradientFidelity(_Observer):
    """Logs now and then how close the engine's gradients come to exact backpropagation's on the same batch.

    Logs ``fidelity/cosine`` and ``fidelity/norm_ratio`` of all parameters, and of each layer with its module path
    behind. Compares on the graph of the training step itself, before it goes backward: the run is bit for bit the
    same as without. Costs two more backward passes at the steps that it looks at, and waits for the device then.

    Args:
        every_n_steps: optimizer steps from one comparison to the next; with accumulation, of the first batch.
        prog_bar: whether the total cosine is shown in the progress bar.

    Raises:
        ValueError: ``every_n_steps`` below 1.
    """

    def _look(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        assert isinstance(trainer.strategy, TrainerCarrier)
        fidelity = loss_fidelity(loss, pl_module, trainer.strategy.handle)
        self._log(pl_module, "", fidelity.total, self.prog_bar)
        for path, agreement in fidelity.layers.items():
            self._log(pl_module, f"/{path}", agreement, False)

    def _log(self, pl_module: pl.LightningModule, where: str, agreement: Agreement, prog_bar: bool) -> None:
        pl_module.log(f"fidelity/cosine{where}", agreement.cosine, on_step=True, on_epoch=False, prog_bar=prog_bar)
        pl_module.log(f"fidelity/norm_ratio{where}", agreement.norm_ratio, on_step=True, on_epoch=False)


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
        self._asking = ExitStack()
        self._figures: Figures = {}

    def _look(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._figures = self._asking.enter_context(engine_figures())

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what the backward pass has told."""
        self._asking.close()
        figures, self._figures = self._figures, {}
        for path, of_chain in figures.items():
            for name, figure in of_chain.items():
                where = f"engine/{name}/{path}".rstrip("/")
                pl_module.log(where, figure, on_step=True, on_epoch=False, prog_bar=self.prog_bar)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Ask no longer: the backward pass may have failed."""
        self._asking.close()
