"""The scan of states with several parts equals a loop, for any dependence between parts."""

import pytest
import torch

from gradfree.algebra.block_scan import block_scan

COUPLINGS = {
    "one part": [[1]],
    "no memory": [[0]],
    "independent": [[1, 0], [0, 1]],
    "the first enters the second": [[1, 0], [1, 1]],
    "both enter both": [[1, 1], [1, 1]],
    "three parts": [[1, 1, 0], [1, 1, 0], [1, 1, 1]],
}


def by_loop(terms, blocks, reverse):
    steps = range(len(terms[0]))
    y = [part.clone() for part in terms]
    for t in list(steps)[-2::-1] if reverse else list(steps)[1:]:
        before, link = (t + 1, t + 1) if reverse else (t - 1, t)
        for i, row in enumerate(blocks):
            y[i][t] += sum(block[link] * y[j][before] for j, block in enumerate(row) if block is not None)
    return y


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 300, 700])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_it_solves_what_a_loop_solves_and_changes_nothing(coupling, length, reverse):
    blocks = [[torch.randn(length, 2, 3) / 2 if on else None for on in row] for row in COUPLINGS[coupling]]
    terms = [torch.randn(length, 2, 3) for _ in blocks]
    copies = [part.clone() for part in terms]
    torch.testing.assert_close(
        block_scan(terms, blocks, reverse), by_loop(terms, blocks, reverse), rtol=1e-11, atol=1e-11
    )
    assert all(map(torch.equal, terms, copies))


def test_16_bit_sums_are_in_float32():
    blocks = [[torch.full((400, 1, 1), 0.5, dtype=torch.bfloat16)] * 2] * 2
    terms = [torch.full((400, 1, 1), 0.01, dtype=torch.bfloat16)] * 2
    found = block_scan(terms, blocks)[0]
    assert found.dtype is torch.bfloat16
    assert found[-1].item() == pytest.approx(4.0, rel=0.05)
