"""Lightning callbacks that log or check what an engine does during training."""

from __future__ import annotations

from contextlib import ExitStack

import lightning.pytorch as pl
from torch import Tensor

from gradfree.chains.solving import Figures, engine_figures
from gradfree.fidelity import Agreement, loss_fidelity
from gradfree.lightning.strategies import EngineMixin


class _Observer(pl.Callback):
    """Checks the first backward pass of every n-th optimizer step.

    Args:
        every_n_steps: optimizer steps from one check to the next; with accumulation, the first batch is checked.
        prog_bar: whether the results are shown in the progress bar.

    Raises:
        ValueError: ``every_n_steps`` below 1.
    """

    def __init__(self, every_n_steps: int = 100, prog_bar: bool = False):
        if every_n_steps < 1:
            raise ValueError(f"{type(self).__name__}: every_n_steps must be at least 1, not {every_n_steps}.")
        self.every_n_steps, self.prog_bar = every_n_steps, prog_bar
        self._seen = -1

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise for a strategy without an engine.

        Raises:
            TypeError: the Trainer's strategy has no engine.
        """
        if not isinstance(trainer.strategy, EngineMixin):
            raise TypeError(
                f"{type(self).__name__} needs a strategy with an engine for the whole model, which "
                f"{type(trainer.strategy).__name__} is not: use Trainer(strategy='<engine>')."
            )
        self._seen = -1

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Run the check in every n-th step."""
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._seen:
            self._seen = step
            self._check(trainer, pl_module, loss)

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        raise NotImplementedError


class GradientFidelity(_Observer):
    """Logs how close the engine's gradients are to exact ones on the same batch.

    Logs ``fidelity/cosine`` and ``fidelity/norm_ratio`` of all parameters, and with ``/<layer>`` of each layer;
    ``delta/cosine/<block>`` and ``delta/norm_ratio/<block>`` of the cotangents of block outputs; and with ``fa``,
    ``feedback/cosine/<layer>`` of feedback weights and the layer's weights. The comparison uses the graph of the
    training step before its backward pass, and does not change the run by a bit. A checked step costs two more backward
    passes and waits for the device.

    Args:
        every_n_steps: optimizer steps from one comparison to the next; with accumulation, on the first batch.
        prog_bar: whether the total cosine is shown in the progress bar.

    Raises:
        ValueError: ``every_n_steps`` below 1.
    """

    def _check(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        assert isinstance(trainer.strategy, EngineMixin)
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


class EngineFigures(_Observer):
    """Logs figures of how the engine solves its chains; see :func:`gradfree.engine_figures`.

    Logs each figure as ``engine/<figure>/<chain>``, such as ``engine/residual/net.blocks``. It does not change the run
    by a bit. A logged step costs one more sweep a chain and does not wait for the device.

    Args:
        every_n_steps: optimizer steps from one log to the next; with accumulation, the first batch is logged.
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
        """Stop collecting figures, since the backward pass may have failed."""
        self._collecting.close()
