"""A pre-LN GPT-style language model."""

from __future__ import annotations

from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AttentionSublayer(nn.Module):
    """x + Attention(LN(x)). With ``causal``, no position attends to later ones."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool = True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.dropout = dropout
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state, shaped as ``x``, (B, T, width)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        return x + F.dropout(self.out(mixed.transpose(1, 2).flatten(-2)), self.dropout, self.training)


class MLPSublayer(nn.Module):
    """x + MLP(LN(x)), with a hidden layer four times as wide."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state, shaped as ``x``, (B, T, width)."""
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def sublayers(layers: int, width: int, heads: int, dropout: float, causal: bool = True) -> nn.Sequential:
    """Return ``layers`` pairs of an attention and an MLP sublayer.

    Raises:
        ValueError: ``heads`` does not divide ``width``.
    """
    if width % heads:
        raise ValueError(f"heads must divide width, but {width} is no multiple of {heads}.")
    pairs = ((AttentionSublayer(width, heads, dropout, causal), MLPSublayer(width, dropout)) for _ in range(layers))
    return nn.Sequential(*chain.from_iterable(pairs))


class GPT(nn.Module):
    """GPT-style language model; each layer is two links of the chain, attention and MLP.

    Initialised as GPT-2: normal weights with standard deviation 0.02. For weights that write to the residual stream it
    is divided by the square root of the number of sublayers. Embedding and output weights are shared.

    Args:
        vocab_size: number of tokens.
        context: length of the longest sequence.
        layers: number of layers, of two sublayers each.
        width: width of the residual stream.
        heads: number of attention heads; must divide ``width``.
        dropout: rate on attention weights, sublayer outputs and embeddings.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int = 256,
        layers: int = 6,
        width: int = 256,
        heads: int = 8,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.sublayers = sublayers(layers, width, heads, dropout)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self._initialise()
        self.head.weight = self.tokens.weight

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / len(self.sublayers) ** 0.5)
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, T, vocab_size) for the next token after each of ``tokens``, int64 (B, T).

        Raises:
            ValueError: T exceeds the context.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens exceed the context of {self.context}.")
        positions = self.positions(torch.arange(length, device=tokens.device))
        stream = self.sublayers(self.dropout(self.tokens(tokens) + positions))
        return self.head(self.norm(stream))
