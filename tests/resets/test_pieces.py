"""The pieces between resets, in batches by length."""

import pytest
import torch

from gradfree.resets.pieces import Pieces


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_every_step_is_in_exactly_one_batch_with_less_than_a_third_of_padding(rate):
    resets = torch.rand(200, 7) < rate
    batches = list(Pieces.from_resets(resets).batches())
    steps = torch.cat([batch.index[batch.valid] for batch in batches])
    assert torch.equal(steps.sort().values, torch.arange(200 * 7))
    for batch in batches:
        assert batch.valid.float().mean() > 2 / 3
        # A row has consecutive steps of one sequence, and starts at a reset or at the sequence's start.
        following = batch.index.diff(dim=0)[batch.valid[1:]]
        assert torch.equal(following, torch.full_like(following, 7))
        begins = batch.index[0]
        assert (resets.flatten()[begins] | (begins < 7)).all()
        assert torch.equal(batch.from_zero, resets.flatten()[begins])
    lengths = [len(batch.index) for batch in batches]
    assert lengths == sorted(lengths, reverse=True)
