"""The formulas of torch's fused cells, which ``torch.func.vmap`` has no rules for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _gru(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Any = None) -> Tensor:
    of_x, of_h = F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh)
    width = h.shape[-1]
    r, z = (of_x[..., : 2 * width] + of_h[..., : 2 * width]).sigmoid().chunk(2, -1)
    n = torch.addcmul(of_x[..., 2 * width :], r, of_h[..., 2 * width :]).tanh()
    return torch.lerp(n, h, z)


def _lstm(
    x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Any = None
) -> tuple[Tensor, Tensor]:
    h, c = hx
    i, f, g, o = (F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _rnn(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Any = None) -> Tensor:
        return function(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh))

    return run


FORMULAS: dict[Any, Callable[..., Any]] = {
    torch.gru_cell: _gru,
    torch.lstm_cell: _lstm,
    torch.rnn_tanh_cell: _rnn(torch.tanh),
    torch.rnn_relu_cell: _rnn(torch.relu),
}
"""Functions with the arguments of torch's."""
