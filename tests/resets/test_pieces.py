"""The pieces between resets, in batches by length."""

import pytest
import torch

from gradfree.resets.pieces import Pieces


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_every_step_lies_in_one_batch_of_which_less_than_a_third_is_padding(rate):
    resets = torch.rand(200, 7) < rate
    batches = list(Pieces.from_resets(resets).batches())
    steps = torch.cat([batch.index[batch.valid] for batch in batches])
    assert torch.equal(steps.sort().values, torch.arange(200 * 7))
    for batch in batches:
        assert batch.valid.float().mean() > 2 / 3
        # A row goes on with the next step of its sequence, and begins where a state is zero or a sequence begins.
        following = batch.index.diff(dim=0)[batch.valid[1:]]
        assert torch.equal(following, torch.full_like(following, 7))
        begins = batch.index[0]
        assert (resets.flatten()[begins] | (begins < 7)).all()
        assert torch.equal(batch.from_zero, resets.flatten()[begins])
    lengths = [len(batch.index) for batch in batches]
    assert lengths == sorted(lengths, reverse=True)
