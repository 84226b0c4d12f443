"""ParaRNN's layers: a GRU and an LSTM with diagonal weights from state to state.

Danieli et al., "ParaRNN: Unlocking parallel training of nonlinear RNNs for large language models", ICLR 2026, arXiv
2510.21450. Without an engine they run as a loop. The engine ``newton`` trains them in a few sweeps over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfree.time.cell_layer import CellLayer, ElementwiseCell


class _ParaCell(ElementwiseCell):
    """The weights of three gates: B and b for the input, and vectors instead of matrices for the state."""

    vectors: tuple[str, ...]
    a: Tensor
    c: Tensor

    def __init__(self, input_size: int, hidden_size: int, clip: float | None):
        super().__init__()
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be positive or None, not {clip}.")
        self.input_size, self.hidden_size, self.clip = input_size, hidden_size, clip
        self.weight = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.bias = nn.Parameter(torch.empty(3 * hidden_size))
        for name in self.vectors:
            setattr(self, name, nn.Parameter(torch.empty(3 if name == "a" else 2, hidden_size)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights: B Kaiming uniform, the vectors Xavier normal, b zero."""
        nn.init.kaiming_uniform_(self.weight)
        nn.init.zeros_(self.bias)
        for name in self.vectors:
            nn.init.xavier_normal_(getattr(self, name))

    def fed(self, x: Tensor) -> Tensor:
        """Return B x + b, (..., 3H)."""
        return F.linear(x, self.weight, self.bias)

    def clipped(self, vectors: Tensor) -> Sequence[Tensor]:
        """Return the vectors of each gate, (H,), clamped to [-``clip``, ``clip``]."""
        return (vectors if self.clip is None else vectors.clamp(-self.clip, self.clip)).unbind()

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{self.input_size}, {self.hidden_size}, clip={self.clip}"


class ParaGRUCell(_ParaCell):
    """z = σ(a_z⊙h + B_z x + b_z), r likewise, n = tanh(a_n⊙(r⊙h) + B_n x + b_n), h' = (1-z)⊙h + z⊙n."""

    vectors = ("a",)

    def advance(self, fed: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return (h',)."""
        (h,), (p_z, p_r, p_n) = state, fed.chunk(3, -1)
        a_z, a_r, a_n = self.clipped(self.a)
        z, r = torch.sigmoid(p_z + a_z * h), torch.sigmoid(p_r + a_r * h)
        return (torch.lerp(h, torch.tanh(p_n + a_n * (r * h)), z),)


class ParaLSTMCell(_ParaCell):
    """An LSTM with coupled forget and input gates, and with peepholes: gates depend on c.

    f = σ(a_f⊙h + c_f⊙c + B_f x + b_f), g = tanh(a_g⊙h + B_g x + b_g), c' = f⊙c + (1-f)⊙g,
    o = σ(a_o⊙h + c_o⊙c' + B_o x + b_o), h' = o⊙tanh(c').
    """

    vectors = ("a", "c")
    parts = 2

    def advance(self, fed: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return (h', c')."""
        (h, c), (p_f, p_g, p_o) = state, fed.chunk(3, -1)
        (a_f, a_g, a_o), (c_f, c_o) = self.clipped(self.a), self.clipped(self.c)
        f = torch.sigmoid(p_f + a_f * h + c_f * c)
        c = torch.lerp(torch.tanh(p_g + a_g * h), c, f)
        o = torch.sigmoid(p_o + a_o * h + c_o * c)
        return o * torch.tanh(c), c


class _ParaLayer(CellLayer):
    """A layer with the call signature of torch's recurrent modules."""

    cell: _ParaCell

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return the outputs, (T, B, H) or with ``batch_first`` (B, T, H), and the final state, shaped as ``state``.

        Args:
            x: (T, B, I), or (B, T, I) with ``batch_first``.
            state: h, (1, B, H); for a ParaLSTM (h, c). ``None``: zeros.

        Raises:
            ValueError: ``x`` is not a batch of sequences with at least one step.
        """
        shape = (x.shape[0] if self.batch_first else x.shape[1], self.cell.hidden_size) if x.dim() == 3 else ()
        several = self.cell.parts > 1
        if state is None:
            parts = (x.new_zeros(shape),) * self.cell.parts
        else:
            parts = tuple(part.squeeze(0) for part in (state if several else (state,)))
        out, final = super().forward(x, parts if several else parts[0])
        return out, tuple(part.unsqueeze(0) for part in final) if several else final.unsqueeze(0)


class ParaGRU(_ParaLayer):
    """A layer of :class:`ParaGRUCell`, with the call signature of a one-layer ``nn.GRU``.

    Initialised as in the paper: B Kaiming uniform, a Xavier normal, b zero.

    Args:
        input_size: I.
        hidden_size: H.
        batch_first: whether sequences are (B, T, ·) rather than (T, B, ·).
        clip: bound on the elements of a: ½ in the paper's language models, 0.9 on synthetic data; ``None`` (on parity)
            is no bound. Elements beyond it get no gradient.

    Raises:
        ValueError: ``clip`` not positive.
    """

    def __init__(self, input_size: int, hidden_size: int, batch_first: bool = False, clip: float | None = 0.5):
        super().__init__(ParaGRUCell(input_size, hidden_size, clip), batch_first)


class ParaLSTM(_ParaLayer):
    """A layer of :class:`ParaLSTMCell`, with the call signature of a one-layer ``nn.LSTM``.

    Forget and input gates are coupled, and gates depend on c through "peepholes". Their vectors, also named c, are
    initialised and clipped as a is. Arguments as in :class:`ParaGRU`.
    """

    def __init__(self, input_size: int, hidden_size: int, batch_first: bool = False, clip: float | None = 0.5):
        super().__init__(ParaLSTMCell(input_size, hidden_size, clip), batch_first)
