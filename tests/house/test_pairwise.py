"""The cover that stands in for full products of settings has every pair of them."""

from itertools import product

from pairwise import cover, pairs

AXES = "abcdef", range(8), (1, 2, 5, 12), ("last", "every", "first", "all but last")


def all_pairs(rows):
    return set().union(*map(pairs, rows))


def test_every_pair_of_values_meets_in_a_fraction_of_the_product():
    rows = cover(product(*AXES))
    assert all_pairs(rows) == all_pairs(product(*AXES))
    assert len(rows) < 0.1 * len(list(product(*AXES)))


def test_a_cover_is_the_same_every_time():
    assert cover(product(*AXES)) == cover(product(*AXES))


def test_rows_that_cannot_be_are_not_chosen_and_no_pair_is_lost_by_it():
    able = [row for row in product(range(5), range(6), range(7)) if row[0] != row[1]]
    rows = cover(able)
    assert set(rows) <= set(able)
    assert all_pairs(rows) == all_pairs(able)
