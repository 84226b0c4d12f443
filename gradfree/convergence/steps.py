"""What one step of a cell costs, a model of one number: how many rows its start is worth."""

from __future__ import annotations

import torch

ROWS_FOR_ONEDNN = 1.0
"""As :func:`rows_for_free`, of oneDNN's LSTM, whose steps start at once: measured."""


def rows_for_free(device: torch.device, units: int, known: bool) -> float:
    """Return the rows of a batch whose work takes as long as a step takes to start.

    On a CPU measured for torch's kernels, 16 rows of 64 units and 8 of 256, and more for cells that are loops in
    Python; on a GPU an estimate that no measurement backs yet.

    Args:
        device: where the chain runs.
        units: H.
        known: whether the cell is one of torch's own.
    """
    if device.type != "cpu":
        return 2**25 / units**2
    return (16.0 if known else 128.0) * min(1.0, (64 / units) ** 0.5)
