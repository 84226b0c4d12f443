"""The recurrence of short vectors with dense links against a loop."""

import pytest
import torch

from gradfree.algebra.affine_scan import affine_scan


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("length", "rows", "units"), [(1, 2, 3), (31, 2, 1), (32, 1, 2), (700, 3, 4)])
def test_it_equals_the_loop(length, rows, units, reverse):
    terms, links = torch.randn(length, rows, units), torch.randn(length, rows, units, units) / (2 * units)
    expected, carried = torch.zeros_like(terms), torch.zeros(rows, units)
    for t in reversed(range(length)) if reverse else range(length):
        link = links[min(t + 1, length - 1)].mT if reverse else links[t]
        carried = terms[t] + (link @ carried[..., None])[..., 0]
        expected[t] = carried
    torch.testing.assert_close(affine_scan(terms, links, reverse), expected, rtol=1e-12, atol=1e-12)


def test_it_sums_in_single_precision_at_least():
    terms, links = torch.ones(1000, 1, 2, dtype=torch.float16), torch.eye(2, dtype=torch.float16).expand(1000, 1, 2, 2)
    assert torch.equal(affine_scan(terms, links)[-1], torch.full((1, 2), 1000, dtype=torch.float16))
