"""How many sweeps take as long as one pass step by step."""

from __future__ import annotations

from torch import Tensor

from gradfree.convergence.steps import ROWS_FOR_ONEDNN, rows_for_free

# What a sweep takes for a row, in multiples of what a step takes for it, and to start, in starts of a step: measured
# for torch's own cells and for those with separate units. Dense Jacobians take a product for each unit.
_ROW, _START = 3.0, 50.0

# Layers have not been seen to take fewer sweeps, with K a part of F, and with all of it.
_FEWEST, _FEWEST_OF_ALL = 8, 3


def sweeps_worth(length: int, like: Tensor, kind: str, jacobian: str) -> int:
    """Return how many sweeps take as long as the sequential call, 0 if too few; on a GPU by estimate alone.

    Args:
        length: T.
        like: a state, (B, H), on the device in question; not looked at.
        kind: of the cell: :attr:`~gradfree.time.forward.Recurrence.kind`.
        jacobian: the option.
    """
    (batch, units), separate = like.shape, kind == "separate units"
    free = rows_for_free(like.device, units, kind not in ("separate units", "any"))
    if kind == "LSTM" and like.device.type == "cpu":
        free = ROWS_FOR_ONEDNN
    row = _ROW if separate or (jacobian != "dense" and kind != "any") else _ROW * units
    worth = int(length * (1 + batch / free) / (_START + row * length * batch / free))
    return worth if worth >= (_FEWEST_OF_ALL if separate or jacobian == "dense" else _FEWEST) else 0
