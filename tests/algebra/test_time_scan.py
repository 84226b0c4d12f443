import pytest
import torch
from oracles import FACTORS, WIDTH, loop

from gradfree.algebra.time_scan import scan


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 257, 600])
@pytest.mark.parametrize("kind", FACTORS)
def test_scan_equals_a_loop(kind, length, reverse):
    terms, factors = torch.randn(length, 3, WIDTH), FACTORS[kind](length)
    expected = loop(terms, factors, reverse)
    torch.testing.assert_close(scan(terms, factors, reverse), expected, rtol=1e-12, atol=1e-12)


def test_operands_may_be_strided_and_are_not_changed():
    terms, factors = torch.randn(3, 33, WIDTH).transpose(0, 1), torch.rand(WIDTH, 3, 33).permute(2, 1, 0)
    before = terms.clone(), factors.clone()
    torch.testing.assert_close(scan(terms, factors, True), loop(terms, factors, True), rtol=1e-12, atol=1e-12)
    assert torch.equal(terms, before[0])
    assert torch.equal(factors, before[1])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("width", [2**14 - 1, 2**14])
def test_scan_of_wide_steps_equals_a_loop(width, reverse):
    terms = torch.randn(33, 1, width)
    for factors in (torch.rand(width), torch.rand(33, 1, width)):
        expected = loop(terms, factors, reverse)
        torch.testing.assert_close(scan(terms, factors, reverse), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["linspace", "of each step"])
def test_infinity_reaches_only_the_steps_after_it(kind, reverse):
    terms, factors = torch.randn(100, 3, WIDTH), FACTORS[kind](100)
    terms[50, 1, 1] = float("inf")
    expected = loop(terms, factors, reverse)
    torch.testing.assert_close(scan(terms, factors, reverse), expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype):
    """Not at every step: over a thousand steps, small terms would be lost in a large sum."""
    terms, factor = torch.rand(1000, 2, 4).to(dtype), torch.tensor(0.99, dtype=torch.float32)
    expected = scan(terms.double(), factor.double(), reverse=True)
    found = scan(terms, factor, reverse=True)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=0.0)
