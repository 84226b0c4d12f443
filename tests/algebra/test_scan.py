import pytest
import torch

from gradfree.algebra.cotangents import reverse_scan

STATE = (3, 4)


def dense_solution(terms, factors):
    """δ_i = Σ_{j≥i} e_j K_j ... K_{i+1}, summed path by path (Highway-BP, eq. 12)."""
    result = []
    for i in range(len(terms)):
        total = torch.zeros(STATE)
        for j in range(i, len(terms)):
            path = torch.zeros(STATE) if terms[j] is None else terms[j]
            for m in range(j, i, -1):
                path = path * factors[m]
            total = total + path
        result.append(total)
    return result


FACTORS = {
    "zero": lambda: 0.0,
    "identity": lambda: 1.0,
    "scalar": lambda: 0.8,
    "diagonal": lambda: torch.randn(STATE),
    "diagonal that broadcasts": lambda: torch.randn(4),
    "mask": lambda: torch.randn(STATE) > 0,
}


@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_scan_sums_all_paths_to_the_later_states(length):
    terms = [torch.randn(STATE) for _ in range(length)]
    factors = [make() for make in [*FACTORS.values(), *FACTORS.values()][:length]]
    for actual, expected in zip(reverse_scan(terms, factors), dense_solution(terms, factors), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_none_is_a_zero_that_costs_no_computation():
    last = torch.randn(STATE)
    delta = reverse_scan([None, None, last], [1.0, 0.0, 1.0])
    assert delta[0] is None
    assert delta[1] is last
    assert delta[2] is last


def test_scan_keeps_the_cotangents_dtype():
    terms = [torch.randn(STATE, dtype=torch.bfloat16) for _ in range(3)]
    delta = reverse_scan(terms, [torch.rand(STATE, dtype=torch.float32)] * 3)
    assert {d.dtype for d in delta} == {torch.bfloat16}
