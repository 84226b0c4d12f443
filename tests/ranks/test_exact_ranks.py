"""Models whose blocks are on several ranks have the gradients of one process, to 1e-10 in float64.

With as many iterations as there are borders they are autograd's; with fewer, those of the engine with one segment per
rank.
"""

from pathlib import Path

import pytest
from rank_processes import results_of_ranks

SCRIPT = Path(__file__).with_name("exact_ranks.py")


def check(found):
    wrong = {case: result for rank in found for case, result in rank.items() if not isinstance(result, int)}
    assert not wrong
    # The first and the last rank also have weights outside of blocks.
    assert all(rank[case] > 0 for rank in found for case in rank)


@pytest.mark.processes
def test_two_ranks_are_exact(tmp_path):
    found = results_of_ranks(tmp_path, SCRIPT)
    check(found)
    assert all(len(rank) > 6 for rank in found)


@pytest.mark.processes
@pytest.mark.slow
def test_two_three_and_four_ranks_are_exact(tmp_path):
    """All kinds of blocks, tied and frozen weights, taps, keyword arguments, checkpoints, uneven runs."""
    found = results_of_ranks(tmp_path, SCRIPT, ranks=4)
    check(found)
    assert len(found[0]) > 90
