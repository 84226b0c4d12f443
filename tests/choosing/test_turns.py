"""Turns of several candidates in the first steps: in order, without timing the first step of each turn."""

import torch

from gradfree.choosing import turns as room
from gradfree.choosing.turns import Turns

CPU = torch.device("cpu")


def test_candidates_have_one_turn_each_and_slow_outliers_do_not_change_their_times(monkeypatch):
    """The first step of a turn does not count either."""
    now = [0.0]
    monkeypatch.setattr(room, "mark", lambda device: now[0])
    turns, order = Turns(2), []
    while (index := turns.current) is not None:
        n = len(order)
        order.append(index)
        turns.begin(CPU)
        now[0] += 100.0 if n % 9 == 0 else 1.0 + index + 50.0 * (n % 4 == 1)
        turns.end(CPU)
    assert order == [0] * 9 + [1] * 9
    assert turns.times() == [1.0, 2.0]
