"""The ``GRU`` of neuralforecast, trained by its own ``fit``."""

from __future__ import annotations

from functools import partial

import pandas as pd
from comparing import Case, Training, compare, noisy_sine
from neuralforecast import NeuralForecast
from neuralforecast.models import GRU

import gradfree.lightning  # noqa: F401  Registers the strategies.

LENGTH = 1500
LINE = 'strategy="shooting"'
CASES = (
    Case("GRU, 2 layers of 32 units, 1500 steps, 2 windows", LINE, 50, {"units": 32, "windows": 2}),
    Case("GRU, 2 layers of 64 units, 1500 steps, 4 windows", LINE, 25, {"units": 64, "windows": 4}),
    Case("GRU, 2 layers of 200 units, 1500 steps, 8 windows", LINE, 12, {"units": 200, "windows": 8}),
)


def prepare(with_line: bool, steps: int, units: int, windows: int) -> Training:
    """Return a function that trains on a noisy sine."""
    values = noisy_sine(3 * LENGTH)
    frame = pd.DataFrame({"unique_id": "one", "ds": range(len(values)), "y": values})
    model = GRU(
        h=12,
        input_size=LENGTH,
        encoder_n_layers=2,
        encoder_hidden_size=units,
        windows_batch_size=windows,
        max_steps=steps,
        random_seed=0,
        accelerator="cpu",
        enable_progress_bar=False,
        strategy="shooting" if with_line else "auto",
    )
    return partial(NeuralForecast([model], freq=1).fit, frame)


if __name__ == "__main__":
    compare("neuralforecast", CASES, prepare)
