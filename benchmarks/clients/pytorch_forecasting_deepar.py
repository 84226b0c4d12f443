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
CASES = (
    Case("DeepAR, 2 layers GRU, 64 units, 1500 steps, batches of 4", 'strategy="shooting"', 15, {"cell": "GRU"}),
    Case("DeepAR, 2 layers LSTM, 64 units, 1500 steps, batches of 4", 'strategy="shooting"', 200, {"cell": "LSTM"}),
    *(
        Case(
            f"DeepAR, 2 layers {cell}, 64 units, 40 series of 100 to 312 steps, batches of 32",
            'strategy="shooting"',
            30,
            {"cell": cell, "longest": 300},
        )
        for cell in ("GRU", "LSTM")
    ),
    Case(
        "DeepAR, 2 layers LSTM, 64 units, 40 series in windows of 25 to 112 steps, batches of 32",
        'strategy="shooting"',
        60,
        {"cell": "LSTM", "longest": 100},
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


def prepare(with_line: bool, steps: int, cell: str, longest: int | None = None) -> Training:
    """Return a function that trains on noisy sines, with ``longest`` on encoders of up to that many steps."""
    data = TimeSeriesDataSet(
        one_series(steps) if longest is None else several_series(),
        time_idx="step",
        target="y",
        group_ids=["series"],
        max_prediction_length=12,
        time_varying_unknown_reals=["y"],
        max_encoder_length=longest or LENGTH,
        min_encoder_length=LENGTH if longest is None else longest // 4,
    )
    model = DeepAR.from_dataset(data, cell_type=cell, hidden_size=64, rnn_layers=2, dropout=0.0)
    loader = data.to_dataloader(train=True, batch_size=4 if longest is None else 32, num_workers=0)
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
