"""``DeepAR`` of pytorch-forecasting, trained by Lightning as its tutorial does."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

import lightning
import numpy as np
import pandas as pd
from comparing import WHOLE, Case, Training, compare, noisy_sine
from pytorch_forecasting import DeepAR, TimeSeriesDataSet

import gradfree.lightning  # noqa: F401  Registers the strategies.

LENGTH = 1500
_SHORT = {"max_encoder_length": 300, "min_encoder_length": 75}
CASES = (
    Case("DeepAR, 2 layers GRU, 64 units, 1500 steps, batches of 4", 'strategy="shooting"', 15, {"cell": "GRU"}),
    Case("DeepAR, 2 layers LSTM, 64 units, 1500 steps, batches of 4", 'strategy="shooting"', 200, {"cell": "LSTM"}),
    *(
        Case(
            f"DeepAR, 2 layers {cell}, 64 units, 40 series of 100 to 312 steps, batches of 32",
            'strategy="shooting"',
            30,
            {"cell": cell, "several": True},
        )
        for cell in ("GRU", "LSTM")
    ),
)


def one_series(steps: int) -> pd.DataFrame:
    """Return a series long enough for so many batches of four windows."""
    values = noisy_sine(LENGTH + 12 + 4 * steps)
    return pd.DataFrame({"series": "one", "step": range(len(values)), "y": values})


def several_series() -> pd.DataFrame:
    """Return 40 series of several lengths, which pytorch-forecasting packs."""
    lengths = np.random.default_rng(0).integers(100, 313, 40)
    series = [
        pd.DataFrame({"series": str(n), "step": range(length), "y": noisy_sine(length)})
        for n, length in enumerate(lengths)
    ]
    return pd.concat(series, ignore_index=True)


def prepare(with_line: bool, steps: int, cell: str, several: bool = False) -> Training:
    """Return a function that trains on noisy sines."""
    windows: dict[str, Any] = _SHORT if several else {"max_encoder_length": LENGTH}
    data = TimeSeriesDataSet(
        several_series() if several else one_series(steps),
        time_idx="step",
        target="y",
        group_ids=["series"],
        max_prediction_length=12,
        time_varying_unknown_reals=["y"],
        **windows,
    )
    model = DeepAR.from_dataset(data, cell_type=cell, hidden_size=64, rnn_layers=2, dropout=0.0)
    loader = data.to_dataloader(train=True, batch_size=32 if several else 4, num_workers=0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        enable_progress_bar=False,
        strategy="shooting" if with_line else "auto",
    )
    return partial(fit_and_validate, trainer, model, loader)


def fit_and_validate(trainer: lightning.Trainer, model: DeepAR, loader: Any) -> dict[str, float]:
    """Return the seconds of the training, and of a validation on the same data."""
    start = perf_counter()
    trainer.fit(model, loader)
    trained = perf_counter()
    trainer.validate(model, loader, verbose=False)
    return {WHOLE: trained - start, "validation": perf_counter() - trained}


if __name__ == "__main__":
    compare("pytorch-forecasting", CASES, prepare)
