"""Stored texts as token sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from gradfree.benchmarks.data.bundled import Data, Split, windows
from gradfree.benchmarks.data.stored import Arrays, Stored

if TYPE_CHECKING:
    from datasets import DatasetDict
    from tokenizers import Tokenizer


UNKNOWN = "<unk>"
"""The token for units outside the vocabulary."""

_CHUNK = 4096
"""Rows tokenized at a time: an encoding takes many times the memory of its token ids."""

_PATTERNS = {"character": r"[\s\S]", "word": r"[^ \n]+|\n"}


@dataclass(frozen=True)
class Text(Stored):
    """A stored text as consecutive sequences.

    Attributes:
        name: name of the set and of its folder.
        unit: kind of tokens: characters; words between spaces, and line ends; or pieces of words, by byte pair encoding
            of the training split.
        vocabulary: number of tokens: :data:`UNKNOWN` and the most frequent ones of the training split; for pieces, all
            bytes and the first merges.
        length: length of the sequences.
        held_out: maximal number of sequences for validation, and for the test.
    """

    unit: Literal["character", "word", "piece"]
    vocabulary: int
    length: int
    held_out: int

    def read(self, splits: DatasetDict) -> dict[str, Arrays]:
        """Return the tokens of each split."""
        # Some sets include line ends, some do not.
        rows = {name: [row.removesuffix("\n") + "\n" for row in splits[name]["text"]] for name in Data._fields}
        tokenizer = _tokenizer(self, rows["train"])
        return {name: (_tokens(tokenizer, lines),) for name, lines in rows.items()}

    def arrange(self, arrays: Mapping[str, Arrays]) -> Data:
        """Return the sequences; the targets are the inputs' next tokens."""
        train, validation, test = (windows(torch.from_numpy(*arrays[name]), self.length) for name in Data._fields)
        return Data(train, *(Split(*(x[: self.held_out] for x in split)) for split in (validation, test)))


def _tokenizer(text: Text, rows: Sequence[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    size: dict[str, Any] = {"vocab_size": text.vocabulary, "show_progress": False}
    if text.unit == "piece":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer: Any = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **size)
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PATTERNS[text.unit]), "removed", invert=True)
        trainer = trainers.WordLevelTrainer(special_tokens=[UNKNOWN], **size)
    tokenizer.train_from_iterator(rows, trainer)
    return tokenizer


def _tokens(tokenizer: Tokenizer, rows: Sequence[str]) -> np.ndarray:
    batches = (rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK))
    encoded = chain.from_iterable(map(tokenizer.encode_batch_fast, batches))
    return np.fromiter(chain.from_iterable(row.ids for row in encoded), dtype=np.int64)
