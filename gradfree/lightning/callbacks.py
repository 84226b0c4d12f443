"""Lightning callbacks that look at an engine while it trains."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import Tensor

from gradfree.fidelity import Agreement, loss_fidelity
from gradfree.lightning.carriers import Carrier


class GradientFidelity(pl.Callback):
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

    def __init__(self, every_n_steps: int = 100, prog_bar: bool = False):
        if every_n_steps < 1:
            raise ValueError(f"GradientFidelity: every_n_steps must be at least 1, not {every_n_steps}.")
        self.every_n_steps, self.prog_bar = every_n_steps, prog_bar
        self._seen = -1

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a strategy without an engine.

        Raises:
            TypeError: the Trainer's strategy carries no engine.
        """
        if not isinstance(trainer.strategy, Carrier):
            raise TypeError(
                f"GradientFidelity compares an engine with backpropagation, but {type(trainer.strategy).__name__} "
                "carries none: use Trainer(strategy='<engine>')."
            )
        self._seen = -1

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Compare and log, if it is time to."""
        step = trainer.global_step
        if step % self.every_n_steps or step == self._seen:
            return
        self._seen = step
        assert isinstance(trainer.strategy, Carrier)
        fidelity = loss_fidelity(loss, pl_module, trainer.strategy.handle)
        self._log(pl_module, "", fidelity.total, self.prog_bar)
        for path, agreement in fidelity.layers.items():
            self._log(pl_module, f"/{path}", agreement, False)

    def _log(self, pl_module: pl.LightningModule, where: str, agreement: Agreement, prog_bar: bool) -> None:
        pl_module.log(f"fidelity/cosine{where}", agreement.cosine, on_step=True, on_epoch=False, prog_bar=prog_bar)
        pl_module.log(f"fidelity/norm_ratio{where}", agreement.norm_ratio, on_step=True, on_epoch=False)
