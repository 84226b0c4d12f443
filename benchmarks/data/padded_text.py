"""Stored texts as sentences, each a sequence of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import WordLevelTrainer

from gradfree.benchmarks.data.bundled import Data, Split
from gradfree.benchmarks.data.stored import Arrays, Stored, check_columns, check_splits
from gradfree.benchmarks.data.text import UNKNOWN

if TYPE_CHECKING:
    from datasets import DatasetDict

PADDING = -100
"""The target behind a sentence's end; losses and scores leave it out."""

_END = "</s>"


@dataclass(frozen=True)
class Sentences(Stored):
    """A stored text, one sentence a row, cut or filled up to one length.

    Attributes:
        name: of the set and its folder; its splits have a column of sentences, called ``column``.
        column: with the sentences.
        vocabulary: number of tokens: that of a sentence's end, the unknown one and the most frequent words of the
            training split.
        length: of the sequences; what is longer is cut.
    """

    column: str
    vocabulary: int
    length: int

    def read(self, splits: DatasetDict) -> dict[str, Arrays]:
        """Return the inputs and targets of each split."""
        check_splits(self.name, splits, "train", "validation", "test")
        check_columns(self.name, splits, self.column)
        tokenizer = Tokenizer(WordLevel(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        trainer = WordLevelTrainer(vocab_size=self.vocabulary, special_tokens=[_END, UNKNOWN], show_progress=False)
        tokenizer.train_from_iterator(splits["train"][self.column], trainer)
        return {name: _arrays(tokenizer, list(split[self.column]), self.length) for name, split in splits.items()}

    def arrange(self, arrays: Mapping[str, Arrays]) -> Data:
        """Return the sentences between two ends; the targets are the inputs' next tokens, then :data:`PADDING`."""
        names = ("train", "validation", "test")
        return Data(*(Split(*map(torch.from_numpy, arrays[name])) for name in names))


def _arrays(tokenizer: Tokenizer, rows: Sequence[str], length: int) -> Arrays:
    (end,) = tokenizer.encode(_END).ids
    inputs = np.full((len(rows), length), end)
    targets = np.full((len(rows), length), PADDING)
    for n, row in enumerate(tokenizer.encode_batch_fast(rows)):
        tokens = [end, *row.ids, end][: length + 1]
        inputs[n, : len(tokens) - 1] = tokens[:-1]
        targets[n, : len(tokens) - 1] = tokens[1:]
    return inputs, targets
