"""``DeepAR`` of pytorch-forecasting, trained by Lightning as its tutorial does."""

from __future__ import annotations

from functools import partial

import lightning
import pandas as pd
from comparing import Case, Training, compare, noisy_sine
from pytorch_forecasting import DeepAR, TimeSeriesDataSet

import gradfree.lightning  # noqa: F401  Registers the strategies.

LENGTH = 1500
CASES = (
    Case("DeepAR, 2 layers GRU, 64 units, 1500 steps, batches of 4", 'strategy="shooting"', 15, {"cell": "GRU"}),
    Case("DeepAR, 2 layers LSTM, 64 units, 1500 steps, batches of 4", 'strategy="shooting"', 200, {"cell": "LSTM"}),
)


def prepare(with_line: bool, steps: int, cell: str) -> Training:
    """Return a function that trains on a noisy sine."""
    values = noisy_sine(LENGTH + 12 + 4 * steps)
    data = TimeSeriesDataSet(
        pd.DataFrame({"series": "one", "step": range(len(values)), "y": values}),
        time_idx="step",
        target="y",
        group_ids=["series"],
        max_encoder_length=LENGTH,
        max_prediction_length=12,
        time_varying_unknown_reals=["y"],
    )
    model = DeepAR.from_dataset(data, cell_type=cell, hidden_size=64, rnn_layers=2, dropout=0.0)
    loader = data.to_dataloader(train=True, batch_size=4, num_workers=0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        enable_progress_bar=False,
        strategy="shooting" if with_line else "auto",
    )
    return partial(trainer.fit, model, loader)


if __name__ == "__main__":
    compare("pytorch-forecasting", CASES, prepare)
