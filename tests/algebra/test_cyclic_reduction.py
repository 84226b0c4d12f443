"""Cyclic reduction equals a loop, and computes in full precision."""

import pytest
import torch

from gradfree.algebra.cyclic_reduction import cyclic_reduction


def by_loop(terms, links):
    y = list(terms)
    for i in reversed(range(len(links))):
        y[i] = y[i] + torch.einsum("bh,bhk->bk", y[i + 1], links[i])
    return torch.stack(y)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 13, 16, 17, 33])
def test_it_solves_what_a_loop_solves_and_changes_nothing(length):
    terms, links = torch.randn(length, 3, 4), torch.randn(length - 1, 3, 4, 4)
    before = terms.clone(), links.clone()
    torch.testing.assert_close(cyclic_reduction(terms, links), by_loop(terms, links), rtol=1e-10, atol=1e-10)
    assert torch.equal(terms, before[0])
    assert torch.equal(links, before[1])


def test_autocast_does_not_change_the_result():
    terms, links = torch.randn(9, 2, 3), torch.randn(8, 2, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        actual = cyclic_reduction(terms, links)
    assert torch.equal(actual, cyclic_reduction(terms, links))
