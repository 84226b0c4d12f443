"""Augmented images are moved and mirrored originals."""

from dataclasses import replace

import torch
from torch.nn.functional import pad

from gradfree.benchmarks.data.augmentation import crop_and_flip
from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.tasks.catalogue import DIGITS
from gradfree.benchmarks.tasks.task import Task


def test_each_image_is_a_crop_of_the_padded_original_or_of_its_mirror_image():
    images = torch.randn(64, 2, 5, 6)
    changed = crop_and_flip(images, torch.Generator().manual_seed(0))
    places = set()
    for before, after in zip(images, changed, strict=True):
        padded = pad(before, (4,) * 4)
        crops = {(i, j): padded[:, i : i + 5, j : j + 6] for i in range(9) for j in range(9)}
        found = [
            (place, mirrored)
            for place, crop in crops.items()
            for mirrored in (False, True)
            if torch.equal(after, crop.flip(2) if mirrored else crop)
        ]
        assert len(found) == 1 or not after.any()
        places.update(found)
    assert {mirrored for _, mirrored in places} == {False, True}
    assert len({place for place, _ in places}) > 20


def test_the_generator_decides():
    images = torch.randn(8, 1, 4, 4)
    first, again, other = (crop_and_flip(images, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_task_augments_its_training_batches_in_the_order_of_the_plain_task():
    inputs, targets = torch.randn(10, 1, 4, 4), torch.arange(10)
    plain = Task("t", tuple, "mlp", {}, DIGITS.score, 0.1, 5, 2)
    augmented = replace(plain, augment=lambda images, generator: -images)
    for before, after in zip(*(t.batches(Split(inputs, targets), 3) for t in (plain, augmented)), strict=True):
        assert torch.equal(before.targets, after.targets)
        assert torch.equal(before.inputs, -after.inputs)
