"""Turns of several ways over the first steps: in an order settled from the start, the first step of each not timed."""

import pytest
import torch

from gradfree.choosing import turns as room
from gradfree.choosing.turns import Turns

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is moved."""
    now = [0.0]
    monkeypatch.setattr(room, "mark", lambda device: now[0])
    return now


def run(turns, clock, cost):
    """Return whose step each was; a step of ``way`` takes ``cost(way, n)``."""
    ways = []
    while turns.current is not None:
        ways.append(turns.current)
        turns.begin(CPU)
        clock[0] += cost(ways[-1], len(ways) - 1)
        turns.end(CPU)
    return ways


def test_ways_take_turns_in_rounds_and_what_disturbs_a_step_changes_no_figure(clock):
    """Nor does the first step of a turn count."""
    turns = Turns(2)
    ways = run(turns, clock, lambda way, n: 100.0 if n % 3 == 0 else 1.0 + way + 50.0 * (n % 4 == 1))
    assert ways == [0, 0, 0, 1, 1, 1] * 4
    assert turns.times() == [1.0, 2.0]


def test_a_hopeless_way_has_one_turn_and_the_number_of_steps_stays(clock):
    ways = run(Turns(3, rounds=3), clock, lambda way, n: [1.0, 3.0, 0.9][way])
    assert ways == [0, 0, 0, 1, 1, 1, 2, 2, 2] + [0, 0, 0, 2, 2, 2, 2, 2, 2] * 2
