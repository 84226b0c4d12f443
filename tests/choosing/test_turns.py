"""Turns of several candidates in the first steps: in a fixed order, without timing the first step of each turn."""

import pytest
import torch

from gradfree.choosing import turns as room
from gradfree.choosing.turns import Turns

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when the test moves it."""
    now = [0.0]
    monkeypatch.setattr(room, "mark", lambda device: now[0])
    return now


def run(turns, clock, cost):
    """Return the candidate of each step; step ``n`` of candidate ``index`` takes ``cost(index, n)``."""
    order = []
    while turns.current is not None:
        order.append(turns.current)
        turns.begin(CPU)
        clock[0] += cost(order[-1], len(order) - 1)
        turns.end(CPU)
    return order


def test_candidates_take_turns_in_rounds_and_slow_outliers_do_not_change_their_times(clock):
    """The first step of a turn does not count either."""
    turns = Turns(2)
    order = run(turns, clock, lambda index, n: 100.0 if n % 3 == 0 else 1.0 + index + 50.0 * (n % 4 == 1))
    assert order == [0, 0, 0, 1, 1, 1] * 4
    assert turns.times() == [1.0, 2.0]


def test_a_much_slower_candidate_has_one_turn_and_the_number_of_steps_stays(clock):
    order = run(Turns(3, rounds=3), clock, lambda index, n: [1.0, 3.0, 0.9][index])
    assert order == [0, 0, 0, 1, 1, 1, 2, 2, 2] + [0, 0, 0, 2, 2, 2, 2, 2, 2] * 2
