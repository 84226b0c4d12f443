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
    while turns.way is not None:
        ways.append(turns.way)
        turns.begin(CPU)
        clock[0] += cost(ways[-1], len(ways) - 1)
        turns.end(CPU)
    return ways


def test_ways_take_turns_in_rounds(clock):
    assert run(Turns(2, rounds=2), clock, lambda way, n: 1.0) == [0, 0, 0, 1, 1, 1] * 2


def test_the_first_step_of_a_turn_does_not_count(clock):
    turns = Turns(2, rounds=3)
    run(turns, clock, lambda way, n: 100.0 if n % 3 == 0 else 1.0 + way)
    assert turns.times() == [1.0, 2.0]


def test_a_hopeless_way_has_one_turn_and_the_number_of_steps_stays(clock):
    turns = Turns(3, rounds=3)
    ways = run(turns, clock, lambda way, n: [1.0, 3.0, 0.9][way])
    assert ways == [0, 0, 0, 1, 1, 1, 2, 2, 2] + [0, 0, 0, 2, 2, 2, 2, 2, 2] * 2


def test_what_disturbs_a_few_steps_changes_no_figure(clock):
    turns = Turns(2)
    run(turns, clock, lambda way, n: 1.0 + way + 50.0 * (n % 4 == 1))
    assert turns.times() == [1.0, 2.0]


def test_a_step_whose_beginning_was_not_told_does_not_count(clock):
    turns = Turns(1, rounds=2)
    for n in range(6):
        if n != 1:
            turns.begin(CPU)
        clock[0] += 1.0 + (n == 1)
        turns.end(CPU)
    assert turns.way is None
    assert turns.times() == [1.0]
