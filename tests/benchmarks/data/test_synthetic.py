"""The tasks are what their docstrings say, by an independent computation."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gradfree.benchmarks.data.synthetic import (
    BLANK,
    COPYING_VOCABULARY,
    Synthetic,
    adding,
    adding_pixels,
    copying,
    parity,
    parity_pixels,
)
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tasks.catalogue import ADDING, COPYING, PARITY
from gradfree.benchmarks.tasks.metrics import recall_accuracy
from gradfree.benchmarks.training.comparison import Training


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


def test_copying_without_memory():
    """Blanks for certain, and eight symbols alike at the last ten steps."""
    _, targets = copying(64, 30, generator())
    logits = torch.full((50, COPYING_VOCABULARY), -math.inf)
    logits[:40, 8] = 0.0
    logits[40:, :8] = 0.0
    loss = F.cross_entropy(logits.expand(64, -1, -1).movedim(-1, 1), targets)
    assert loss.item() == pytest.approx(10 * math.log(8) / 50)


@pytest.mark.parametrize("length", [2, 3, 20])
def test_adding_sums_the_number_marked_in_either_half(length):
    inputs, targets = adding(256, length, generator())
    assert inputs.shape == (256, length, 2)
    assert targets.shape == (256, 1)
    assert inputs.dtype == targets.dtype == torch.get_default_dtype()
    places = set()
    for sequence, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert all(0 <= number < 1 for number, _ in sequence)
        first, second = (n for n, (_, mark) in enumerate(sequence) if mark == 1)
        assert sum(mark for _, mark in sequence) == 2
        assert first < length // 2 <= second
        assert target == pytest.approx([sequence[first][0] + sequence[second][0]])
        places |= {first, second}
    assert places == set(range(length))


def test_adding_without_memory():
    _, targets = adding(20000, 5, generator())
    assert targets.mean().item() == pytest.approx(1, abs=0.02)
    assert F.mse_loss(torch.ones_like(targets), targets).item() == pytest.approx(1 / 6, rel=0.05)


@pytest.mark.parametrize("length", [1, 2, 21])
def test_parity_is_one_for_an_odd_number_of_ones(length):
    inputs, targets = parity(64, length, generator())
    assert inputs.shape == (64, length)
    assert inputs.dtype == targets.dtype == torch.int64
    assert set(inputs.flatten().tolist()) == {0, 1}
    for bits, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        odd = False
        for bit in bits:
            odd ^= bool(bit)
        assert target == odd


def test_parity_without_memory():
    _, targets = parity(20000, 5, generator())
    assert targets.double().mean().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("task", [copying, adding, parity])
def test_batches_come_from_the_generator_alone(task):
    before = torch.get_rng_state()
    source = generator()
    first, second = task(8, 20, source), task(8, 20, source)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first.inputs, second.inputs)
    assert all(map(torch.equal, task(8, 20, generator()), first))


def test_adding_and_parity_as_images_of_one_row():
    images, plain = (make(4, 7, generator()) for make in (adding_pixels, adding))
    assert images.inputs.shape == (4, 2, 1, 7)
    assert torch.equal(images.inputs.flatten(2).transpose(1, 2), plain.inputs)
    assert torch.equal(images.targets, plain.targets)
    images, plain = (make(4, 7, generator()) for make in (parity_pixels, parity))
    assert images.inputs.dtype == torch.get_default_dtype()
    assert torch.equal(images.inputs.flatten(1), plain.inputs.to(images.inputs.dtype))
    assert images.inputs.shape == (4, 1, 1, 7)
    assert torch.equal(images.targets, plain.targets)


def test_a_made_up_set_is_the_same_every_time_and_holds_out_other_examples():
    made = Synthetic(copying, length=3, train=50, held_out=20)
    train, validation, test = made()
    assert [len(split.inputs) for split in (train, validation, test)] == [50, 20, 20]
    assert len({tuple(row) for split in made() for row in split.inputs.tolist()}) == 90
    assert all(map(torch.equal, (*train, *validation), (*made().train, *made().validation)))


def test_recall_counts_the_symbols_alone():
    _, targets = copying(16, 3, generator())
    logits = F.one_hot(targets, COPYING_VOCABULARY).double()
    logits[:, :-10] = 0.0  # Whatever is said in place of the blanks.
    logits[:8, -5:] = F.one_hot(torch.tensor(BLANK), COPYING_VOCABULARY).double()
    metric = recall_accuracy()
    metric.update(logits, targets)
    assert metric.compute().item() == pytest.approx(0.75)


@pytest.mark.parametrize("task", [COPYING, ADDING, PARITY], ids=lambda task: task.name)
def test_synthetic_tasks_train_and_are_scored(task):
    torch.set_default_dtype(torch.float32)
    small = replace(task, data=replace(task.data, length=4, train=64, held_out=32), batch_size=32, steps=30)
    results = Training(task=small, row=Row("backprop", "backprop", {}), device="cpu", seed=0).run()
    assert results["losses"][-1]["loss"] < results["losses"][0]["loss"]
    assert results["validation"] > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: copying(1, 0, generator()), "delay must be at least 1, not 0"),
        (lambda: adding(1, 1, generator()), "length must be at least 2, not 1"),
        (lambda: parity(1, 0, generator()), "length must be at least 1, not 0"),
    ],
)
def test_wrong_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
