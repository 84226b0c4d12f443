"""A loader that continues with the next batch of its epoch."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from gradfree.lightning import ResumableLoader

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def loader(epoch, state=None):
    examples = TensorDataset(torch.arange(10))
    sampler = DistributedSampler(examples, 1, 0, seed=3)
    sampler.set_epoch(epoch)
    loader = ResumableLoader(examples, 2, sampler=sampler)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def batches(loader):
    return [batch[0].tolist() for batch in loader]


def test_a_resumed_loader_continues_with_the_next_batch_of_its_epoch_only():
    first = loader(4)
    seen = [batch[0].tolist() for batch in islice(first, 3)]
    state = first.state_dict()
    resumed = loader(4, state)
    assert seen + batches(resumed) == batches(loader(4))
    assert batches(resumed) == batches(loader(4))
    assert batches(loader(5, state)) == batches(loader(5))
    assert batches(loader(4)) != batches(loader(5))


def test_after_the_last_batch_of_a_sampler_without_epochs_the_next_epoch_begins():
    """For a sampler without epochs, position (0, 5) is the end of an epoch; the next epoch must be complete."""
    examples = TensorDataset(torch.arange(10))
    first = ResumableLoader(examples, 2)
    whole = batches(first)
    for place in (5, 2):
        resumed = ResumableLoader(examples, 2)
        resumed.load_state_dict({"epoch": 0, "batches": place})
        assert batches(resumed) == whole[place % 5 :]
        assert batches(resumed) == whole


def test_a_loader_does_not_change_the_random_numbers_of_dropout():
    """An iterator without a generator would use torch's; our loader's order still depends on the seed."""
    before = torch.get_rng_state()
    one, other = loader(4), loader(4)
    batches(one)
    assert torch.equal(torch.get_rng_state(), before)
    assert one.generator is not other.generator
    torch.manual_seed(7)
    assert loader(4).generator.initial_seed() == 7


def test_a_loaded_position_is_saved_again_before_the_first_batch():
    resumed = loader(4, {"epoch": 4, "batches": 3})
    assert resumed.state_dict() == {"epoch": 4, "batches": 3}
    next(iter(resumed))
    assert resumed.state_dict() == {"epoch": 4, "batches": 4}
