"""A recurrent language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradfree.models.recurrent import recurrent, run

_STD = 0.02
"""Standard deviation of the transformer's initial weights, as in GPT-2."""


class PlainStack(nn.Module):
    """Recurrent layers with residual connections between them."""

    def __init__(self, cell: str, layers: int, width: int, dropout: float, clip: float | None):
        super().__init__()
        self.rnns = nn.ModuleList(recurrent(cell, width, clip) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, states: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return the features, shaped as ``x``, (B, T, width), and the final states, (layers, parts, B, width)."""
        finals = []
        for n, (rnn, state) in enumerate(zip(self.rnns, states, strict=True)):
            out, final = run(rnn, x, state)
            x = x + self.dropout(out) if n else self.dropout(out)
            finals.append(final)
        return x, torch.stack(finals)


class TransformerStack(nn.Module):
    """Pre-LN transformer with recurrent layers instead of attention: x + Linear(RNN(LN(x))), then x + MLP(LN(x))."""

    def __init__(self, cell: str, layers: int, width: int, dropout: float, clip: float | None):
        super().__init__()
        last = _STD / (2 * layers) ** 0.5
        # One list for each kind of layer: a list of whole blocks would be taken for a chain in depth.
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.rnns = nn.ModuleList(recurrent(cell, width, clip) for _ in range(layers))
        self.outs = nn.ModuleList(_linear(width, width, last) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), _linear(width, 4 * width, _STD), nn.GELU(), _linear(4 * width, width, last)
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, states: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return the features, shaped as ``x``, (B, T, width), and the final states, (layers, parts, B, width)."""
        finals = []
        for norm, rnn, out, mlp, state in zip(self.norms, self.rnns, self.outs, self.mlps, states, strict=True):
            mixed, final = run(rnn, norm(x), state)
            x = x + self.dropout(out(mixed))
            x = x + self.dropout(mlp(x))
            finals.append(final)
        return self.norm(x), torch.stack(finals)


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear


_STACKS = {"plain": PlainStack, "transformer": TransformerStack}


class RecurrentLM(nn.Module):
    """Recurrent language model: embedding, recurrent layers, linear head (weights not shared with the embedding).

    With "plain" blocks it is the word and character model of Highway-BP (arXiv 2501.17086, Tables 2 and 5), with
    torch's initialisation. With "transformer" blocks it is the model of DSF (arXiv 2503.23104), initialised as GPT-2:
    normal weights with standard deviation 0.02, divided by the square root of the number of sublayers for weights that
    write to the residual stream. Its recurrent layers keep torch's initialisation.

    Args:
        vocab_size: number of tokens.
        cell: "gru", "lstm", "rnn", "para_gru" or "para_lstm".
        layers: number of recurrent layers.
        width: width of embedding, states and residual stream.
        block: "plain": recurrent layers with residual connections between them. "transformer": x + Linear(RNN(LN(x))),
            then x + MLP(LN(x)), with a hidden layer four times as wide.
        dropout: rate on embeddings and on what is added to the residual stream.
        carry: whether a batch in training starts from the final states of the batch before, detached (truncated BPTT),
            unless ``states`` are passed. After a batch of another size it starts from zero.
        clip: see :class:`ParaGRU`; only for ParaRNN's cells.

    Raises:
        ValueError: unknown cell or block, less than one layer, or a bad ``clip``.
    """

    carried: Tensor | None

    def __init__(
        self,
        vocab_size: int,
        cell: str = "gru",
        layers: int = 1,
        width: int = 256,
        block: str = "plain",
        dropout: float = 0.0,
        carry: bool = False,
        clip: float | None = 0.5,
    ):
        super().__init__()
        if block not in _STACKS:
            raise ValueError(f"block must be one of {', '.join(map(repr, _STACKS))}, not {block!r}.")
        if layers < 1:
            raise ValueError(f"layers must be at least 1, not {layers}.")
        self.layers, self.carry = layers, carry
        self.register_buffer("carried", None, persistent=False)
        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.stack = _STACKS[block](cell, layers, width, dropout, clip)
        self.head = nn.Linear(width, vocab_size)
        if block == "transformer":
            nn.init.normal_(self.embedding.weight, std=_STD)
            nn.init.normal_(self.head.weight, std=_STD)
            nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, states: Tensor | None = None) -> Tensor:
        """Return logits (B, T, vocab_size) for the token after each of ``tokens``; arguments as in :meth:`unroll`."""
        if not (self.carry and self.training):
            return self.unroll(tokens, states)[0]
        if states is None and self.carried is not None and self.carried.shape[2] == len(tokens):
            states = self.carried
        logits, finals = self.unroll(tokens, states)
        self.carried = finals.detach()
        return logits

    def unroll(self, tokens: Tensor, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the logits and the states after the last token, from which the next call can start.

        To train window by window (truncated BPTT), pass ``states.detach()`` to the next call.

        Args:
            tokens: int64 (B, T).
            states: states of all layers, (layers, parts, B, width): h, and for LSTMs then c. ``None``: zero.

        Returns:
            Logits (B, T, vocab_size) for the next token after each of ``tokens``, and the states, shaped as above.
        """
        x = self.dropout(self.embedding(tokens))
        x, states = self.stack(x, [None] * self.layers if states is None else states.unbind())
        return self.head(x), states
