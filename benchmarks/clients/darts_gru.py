"""A recurrent model of darts, trained by its own ``fit``."""

from __future__ import annotations

from functools import partial

import numpy as np
from comparing import Case, Training, compare, noisy_sine
from darts import TimeSeries
from darts.models import RNNModel

import gradfree.lightning  # noqa: F401  Registers the strategies.

LINE = 'pl_trainer_kwargs={"strategy": "shooting"}'
LENGTH = 1500
CASES = (
    Case("RNNModel, GRU, 32 units, 1500 steps, batches of 2", LINE, 100, {"hidden_dim": 32, "batch_size": 2}),
    Case("RNNModel, GRU, 64 units, 1500 steps, batches of 4", LINE, 40, {"hidden_dim": 64, "batch_size": 4}),
    Case("RNNModel, GRU, 25 units, 1500 steps, batches of 32", LINE, 20, {"hidden_dim": 25, "batch_size": 32}),
)


def prepare(with_line: bool, steps: int, hidden_dim: int, batch_size: int) -> Training:
    """Return a function that trains on a noisy sine."""
    values = noisy_sine(LENGTH + batch_size * steps)
    strategy = "shooting" if with_line else "auto"
    model = RNNModel(
        model="GRU",
        input_chunk_length=LENGTH - 100,
        training_length=LENGTH,
        hidden_dim=hidden_dim,
        batch_size=batch_size,
        n_epochs=1,
        random_state=0,
        pl_trainer_kwargs={"accelerator": "cpu", "enable_progress_bar": False, "strategy": strategy},
    )
    return partial(model.fit, TimeSeries.from_values(values.astype(np.float32)))


if __name__ == "__main__":
    compare("darts", CASES, prepare)
