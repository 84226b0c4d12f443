"""Synthetic tasks that need a long memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator

from gradfree.benchmarks.data.bundled import Data, Split

COPYING_VOCABULARY = 10
"""Tokens of :func:`copying`: eight symbols, blank and delimiter."""

BLANK = 8
"""The blank token of :func:`copying`."""

_SYMBOLS, _DELIMITER = 8, 9
_COPIED = 10
_CUES = 7


def copying(batch_size: int, delay: int, generator: Generator) -> Split:
    """Return sequences whose first ten symbols must be repeated after ``delay`` steps.

    The copying memory problem of Arjovsky et al. 2016, arXiv 1511.06464: ten symbols drawn from 0 to 7, ``delay`` - 1
    blanks (8), a delimiter (9) and ten blanks; the targets are ``delay`` + 10 blanks and the ten symbols. Without
    memory the minimal mean cross-entropy is 10 ln 8 / (``delay`` + 20), and 1/8 of the ten symbols are right.

    Returns:
        Inputs and targets, int64 (B, ``delay`` + 20).
    """
    symbols = torch.randint(_SYMBOLS, (batch_size, _COPIED), generator=generator)
    blanks = symbols.new_full((batch_size, delay + _COPIED), BLANK)
    inputs = torch.cat([symbols, blanks], 1)
    inputs[:, _COPIED + delay - 1] = _DELIMITER
    return Split(inputs, torch.cat([blanks, symbols], 1))


def adding_pixels(batch_size: int, length: int, generator: Generator) -> Split:
    """Return sequences of numbers as images of one row; the target is the sum of the two marked numbers.

    The adding problem of Hochreiter & Schmidhuber 1997, "Long short-term memory", section 5.4, in the simpler form
    of Arjovsky et al. 2016, arXiv 1511.06464: numbers uniform in [0, 1), one marked in either half. Without memory
    the best guess is 1, with a mean squared error of 1/6.

    Returns:
        Inputs (B, 2, 1, ``length``), number and mark, and targets (B, 1), of the default dtype.
    """
    half = length // 2
    numbers = torch.rand(batch_size, length, generator=generator)
    first = torch.randint(half, (batch_size, 1), generator=generator)
    second = half + torch.randint(length - half, (batch_size, 1), generator=generator)
    marks = torch.zeros_like(numbers).scatter_(1, torch.cat([first, second], 1), 1.0)
    return Split(torch.stack([numbers, marks], 1).unsqueeze(2), (numbers * marks).sum(1, keepdim=True))


def parity_pixels(batch_size: int, length: int, generator: Generator) -> Split:
    """Return random bits as images of one row; the target is their parity, 1 if the number of ones is odd.

    Each bit flips the answer: without memory half of the guesses are right, and the minimal mean cross-entropy is
    ln 2.

    Returns:
        Inputs (B, 1, 1, ``length``) of the default dtype, and targets, int64 (B,).
    """
    bits = torch.randint(2, (batch_size, length), generator=generator)
    return Split(bits[:, None, None].to(torch.get_default_dtype()), bits.sum(1) % 2)


def recall_pixels(batch_size: int, length: int, generator: Generator) -> Split:
    """Return sequences of symbols as images of one row; the target is the one symbol that is marked, in the first half.

    Delayed recall among distractors: a symbol of eight at each step, one of them with a mark. Without memory one of
    eight guesses is right, and the minimal mean cross-entropy is ln 8.

    Returns:
        Inputs (B, 9, 1, ``length``) of the default dtype, eight symbols and the mark, and targets, int64 (B,).
    """
    symbols = torch.randint(_SYMBOLS, (batch_size, length), generator=generator)
    marked = torch.randint(max(length // 2, 1), (batch_size, 1), generator=generator)
    channels = torch.zeros(batch_size, _SYMBOLS + 1, length)
    channels.scatter_(1, symbols.unsqueeze(1), 1.0)
    channels[:, _SYMBOLS].scatter_(1, marked, 1.0)
    return Split(channels.unsqueeze(2), symbols.gather(1, marked).squeeze(1))


def evidence_pixels(batch_size: int, length: int, generator: Generator) -> Split:
    """Return sequences of cues as images of one row; the target is the side with more of the seven cues.

    Evidence accumulation (Bellec et al. 2020, "A solution to the learning dilemma for recurrent networks of spiking
    neurons", Fig. 4): cues from the left or the right, evenly spread over the first half; then noise only, and the
    decision at the last step.

    Returns:
        Inputs (B, 3, 1, ``length``) of the default dtype, left, right and noise, and targets, int64 (B,), 1 for right.
    """
    right = torch.randint(2, (batch_size, _CUES), generator=generator)
    channels = torch.zeros(batch_size, 3, length)
    channels[:, 2] = torch.rand(batch_size, length, generator=generator)
    for n, at in enumerate(torch.linspace(0, length // 2 - 1, _CUES).round().long().tolist()):
        channels[:, 0, at] = 1.0 - right[:, n]
        channels[:, 1, at] = right[:, n].to(channels.dtype)
    return Split(channels.unsqueeze(2), (right.sum(1) > _CUES // 2).long())


@dataclass(frozen=True)
class Synthetic:
    """Synthetic examples from a fixed seed.

    Attributes:
        make: :func:`copying`, or another function of a batch size, a length and a generator.
        length: second argument of ``make``: length of the sequences, or the delay of :func:`copying`.
        train: number of training sequences.
        held_out: number of sequences for validation, and for the test.
    """

    make: Callable[[int, int, Generator], Split]
    length: int
    train: int
    held_out: int

    def __call__(self) -> Data:
        """Return the examples."""
        generator = Generator().manual_seed(0)
        return Data(*(self.make(n, self.length, generator) for n in (self.train, self.held_out, self.held_out)))
