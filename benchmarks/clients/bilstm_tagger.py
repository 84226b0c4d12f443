"""The bidirectional LSTM tagger of many PyTorch tutorials, on packed sentences and on packed sensor series."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from comparing import Case, Training, compare
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gradfree

WORDS, TAGS, BATCH = 2000, 12, 32
LINE = 'EngineOptimizer(torch.optim.Adam(...), model, engine="shooting")'
CASES = (
    Case("BiLSTM tagger, 128 units, sentences of 5 to 60 words, batches of 32", LINE, 60, {"longest": 60}),
    Case("BiLSTM tagger, 128 units, series of 5 to 400 steps, batches of 32", LINE, 8, {"longest": 400}),
)


class Tagger(nn.Module):
    """Embedding, bidirectional LSTM, linear layer."""

    def __init__(self, words: int = WORDS, tags: int = TAGS, width: int = 100, units: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, units, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * units, tags)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Return the scores of the tags, (B, T, tags), for ``words`` (B, T) with ``lengths`` (B,)."""
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(out)


def prepare(with_line: bool, steps: int, longest: int) -> Training:
    """Return a function that trains on random words, whose tag depends on the word before; lengths are log-normal."""
    lengths = (torch.randn(steps, BATCH).mul(0.6).exp() * longest / 3).round().clamp(5, longest).long()
    words = torch.randint(WORDS, (steps, BATCH, longest))
    model = Tagger()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    if with_line:
        optimizer = gradfree.EngineOptimizer(optimizer, model, engine="shooting")
    return partial(train, model, optimizer, words, lengths)


def train(model: Callable[..., Tensor], optimizer: torch.optim.Optimizer, words: Tensor, lengths: Tensor) -> None:
    """Train for one step on each batch."""
    for batch, own in zip(words, lengths, strict=True):
        scores = model(batch, own)
        steps = torch.arange(scores.shape[1])
        tags = batch.roll(1, 1)[:, : len(steps)].remainder(TAGS).masked_fill(steps >= own[:, None], -100)
        optimizer.zero_grad()
        nn.functional.cross_entropy(scores.flatten(0, 1), tags.flatten()).backward()
        optimizer.step()


if __name__ == "__main__":
    compare("torch", CASES, prepare)
