"""How many sweeps take as long as one pass step by step."""

from __future__ import annotations

import torch

from gradfree.convergence.steps import ROWS_FOR_ONEDNN, rows_for_free

# What a sweep takes for a row, in multiples of what a step takes for it, and to start, in starts of a step: measured
# for torch's own cells and for those with separate units. Other cells take a product for each unit.
_ROW, _ROW_OF_SEPARATE, _START = 3.0, 9.0, 50.0


def sweeps_worth(length: int, batch: int, units: int, device: torch.device, kind: str) -> float:
    """Return how many sweeps take as long as the sequential call; on a GPU an estimate that no measurement backs yet.

    Args:
        length: T.
        batch: B.
        units: H.
        device: where the chain runs.
        kind: of the cell: :attr:`~gradfree.time.forward.Recurrence.kind`.
    """
    others = {"separate units": _ROW_OF_SEPARATE, "any": _ROW_OF_SEPARATE * units}
    free = rows_for_free(device, units, kind not in others)
    if kind == "LSTM" and device.type == "cpu":
        free = ROWS_FOR_ONEDNN
    return length * (1 + batch / free) / (_START + others.get(kind, _ROW) * length * batch / free)
