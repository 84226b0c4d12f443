"""The synthetic tasks follow their docstrings, checked by an independent computation."""

import pytest
import torch
import torch.nn.functional as F

from gradfree.benchmarks.data.synthetic import (
    BLANK,
    COPYING_VOCABULARY,
    adding_pixels,
    copying,
    evidence_pixels,
    parity_pixels,
    recall_pixels,
)
from gradfree.benchmarks.tasks.metrics import recall_accuracy


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("delay", [1, 2, 30])
def test_copying_recalls_the_first_ten_symbols_after_the_delimiter(delay):
    inputs, targets = copying(64, delay, generator())
    assert inputs.dtype == targets.dtype == torch.int64
    for read, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        symbols = read[:10]
        assert set(symbols) <= set(range(8))
        assert read[10:] == [8] * (delay - 1) + [9] + [8] * 10
        assert wanted == [8] * (delay + 10) + symbols
    assert set(inputs[:, :10].flatten().tolist()) == set(range(8))


@pytest.mark.parametrize("length", [2, 3, 20])
def test_adding_sums_the_number_marked_in_either_half(length):
    inputs, targets = adding_pixels(256, length, generator())
    numbers, marks = inputs.squeeze(2).unbind(1)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert (marks[:, : length // 2].sum(1) == 1).all()
    assert (marks[:, length // 2 :].sum(1) == 1).all()
    torch.testing.assert_close(targets, numbers[marks == 1].view(-1, 2).sum(1, keepdim=True))
    assert marks.sum(0).all()


@pytest.mark.parametrize("length", [1, 2, 21])
def test_parity_is_one_for_an_odd_number_of_ones(length):
    inputs, targets = parity_pixels(64, length, generator())
    assert set(inputs.flatten().tolist()) == {0, 1}
    assert targets.tolist() == [bits.count(1) % 2 for bits in inputs.flatten(1).tolist()]


@pytest.mark.parametrize("length", [2, 9, 30])
def test_delayed_recall_asks_for_the_marked_symbol(length):
    inputs, targets = recall_pixels(256, length, generator())
    for steps, wanted in zip(inputs.squeeze(2).transpose(1, 2).tolist(), targets.tolist(), strict=True):
        assert all(sum(step[:8]) == 1 for step in steps)
        (marked,) = [n for n, step in enumerate(steps) if step[8]]
        assert marked < max(length // 2, 1)
        assert steps[marked][wanted] == 1
    assert set(targets.tolist()) == set(range(8))


@pytest.mark.parametrize("length", [14, 15, 60])
def test_evidence_is_the_side_with_more_of_seven_cues(length):
    inputs, targets = evidence_pixels(256, length, generator())
    left, right, noise = inputs.squeeze(2).unbind(1)
    assert (left.sum(1) + right.sum(1) == 7).all()
    assert targets.tolist() == (right.sum(1) > left.sum(1)).long().tolist()
    assert not left[:, length // 2 :].any()
    assert not right[:, length // 2 :].any()
    assert noise.min() >= 0
    assert 0.4 < targets.double().mean() < 0.6


def test_recall_counts_only_the_symbols():
    _, targets = copying(16, 3, generator())
    logits = F.one_hot(targets, COPYING_VOCABULARY).double()
    logits[:, :-10] = 0.0  # Predictions for blanks do not matter.
    logits[:8, -5:] = F.one_hot(torch.tensor(BLANK), COPYING_VOCABULARY).double()
    metric = recall_accuracy()
    metric.update(logits, targets)
    assert metric.compute().item() == pytest.approx(0.75)
