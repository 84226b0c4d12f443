"""Rows without hooks under DDP and FSDP2: two ranks train as one process does."""

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp")
import row_ranks
from rank_processes import results_of_ranks

pytestmark = pytest.mark.slow


@pytest.mark.processes
def test_two_ranks_train_as_one_process_does(tmp_path):
    for found in results_of_ranks(tmp_path, row_ranks.__file__):
        expected, _ = found.pop("one process")
        assert found.keys() == {way.__name__ for way in row_ranks.WAYS}
        for weights, by_hooks in found.values():
            torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)
            assert not by_hooks
