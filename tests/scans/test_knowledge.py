"""Which way a loop takes next, by the times of its calls, and how long its burn-in is, by the errors of the last."""

import itertools
from math import log2

import pytest
import torch

from gradfree.convergence.outcome import Outcome, StoppingRule
from gradfree.scans.knowledge import PLAIN, Contest, ScanPass, Way, by_newton
from gradfree.segments.rule import SegmentPlan

NEWTON = by_newton(1000)


def calls(seconds, first=NEWTON, count=20, compiled=None, contest=None, burn=0):
    """Return how ``count`` calls ran, by the ``seconds`` of a pass in each way."""
    contest, ways = contest or Contest([first], compiled), []
    for _ in range(count):
        way, is_timed = contest.next(125, burn)
        ways.append(way)
        if is_timed:
            for what in ("forward", "backward"):
                contest.note(way, what, 0.0, seconds(way))
    return ways


@pytest.mark.parametrize(("slower", "turns"), [(2.0, 3), (10.0, 1)])
def test_what_is_many_times_slower_is_timed_once(slower, turns):
    ways = calls(lambda way: slower if way == PLAIN else 1.0)
    assert ways == [NEWTON] * 3 + [PLAIN] * turns + [NEWTON] * (17 - turns)


def test_a_hopeless_first_way_ends_its_turn_when_others_are_timed_again():
    """After 256 calls."""
    slow = [way for way in calls(lambda way: 10.0 if way == PLAIN else 1.0, count=300) if way == PLAIN]
    assert len(slow) == 2


def test_fewer_segments_are_tried_where_newton_loses_to_the_loop_and_beats_the_first_number():
    seconds = {NEWTON: 1.5, PLAIN: 1.0, Way(64): 2.0, Way(16): 0.5}
    ways = calls(lambda way: seconds.get(way, 3.0), contest=Contest([NEWTON, Way(64)], None), count=30)
    assert ways[-1] == Way(16)


def test_numbers_of_segments_climb_to_the_fastest():
    ways = calls(lambda way: abs(way.segments - 64) + 1.0, Way(8))
    turns = [(way.segments, len(list(own))) for way, own in itertools.groupby(ways)]
    assert turns[:5] == [(8, 3), (1, 3), (4, 3), (16, 3), (32, 3)]
    assert ways[-1].segments == 64


@pytest.mark.parametrize(
    ("best", "tried"), [(64, [64, 32, 1]), (32, [64, 32, 1, 16]), (16, [64, 32, 1, 16, 8]), (1, [64, 32, 1])]
)
def test_fewer_segments_may_be_faster_compiled(best, tried):
    """The plain loop may be, too. Compiled chunks of eight steps must fill the segments."""

    def seconds(way):
        return 0.5 + abs(log2(way.segments / best)) / 20 if way.is_compiled else abs(way.segments - 64) + 1.0

    ways = calls(seconds, Way(64), count=40, compiled=1024)
    assert list(dict.fromkeys(way for way in ways if way.is_compiled)) == [Way(count, True) for count in tried]
    assert ways[-1] == Way(best, True)


@pytest.mark.parametrize(("compiled", "fastest"), [(None, PLAIN), (1024, Way(1, True))])
def test_all_times_are_taken_again_when_segments_need_a_longer_burn_in(compiled, fastest):
    contest = Contest([Way(64)], compiled)
    short = calls(
        lambda way: (abs(way.segments - 64) + 20.0) / (1 + way.is_compiled), count=40, contest=contest, burn=40
    )
    assert short[-1].segments == 64

    def seconds(way):
        return (400.0 if way.segments > 1 else 100.0) / (1 + way.is_compiled)

    assert calls(seconds, contest=contest, burn=48)[-1] == short[-1]
    assert calls(seconds, contest=contest, burn=80, count=30)[-1] == fastest


def test_batches_that_need_different_burn_ins_do_not_start_the_timing_each_time():
    contest, timed = Contest([Way(64)], None), 0
    for burn in [40, 80] * 100:
        way, is_timed = contest.next(125, burn)
        timed += is_timed
        if is_timed:
            for what in ("forward", "backward"):
                contest.note(way, what, 0.0, abs(way.segments - 64) + 1.0)
    assert timed < 20


def test_the_time_of_compiling_does_not_count():
    contest = Contest([NEWTON], 1000)
    seen = set()
    for _ in range(20):
        way, is_timed = contest.next(125, 0)
        seconds = 3.0 if not way.is_compiled else 0.5 if way in seen else 100.0
        seen.add(way)
        if is_timed:
            for what in ("forward", "backward"):
                contest.note(way, what, 0.0, seconds if way != PLAIN else 2.0)
    assert contest.fastest == Way(1, is_compiled=True)


@pytest.mark.parametrize("candidates", [[NEWTON], [NEWTON, Way(64)]])
@pytest.mark.parametrize(("of_compiled", "fastest"), [(0.3, Way(1, is_compiled=True)), (3.0, NEWTON)])
def test_the_compiled_loop_is_timed_beside_newtons_method(of_compiled, fastest, candidates):
    """Whose steps run all at once, so that it has no chunks to compile."""
    seconds = {PLAIN: 2.0, Way(1, is_compiled=True): of_compiled}
    ways = calls(lambda way: seconds.get(way, 1.0), contest=Contest(candidates, 1000))
    assert set(ways) == {NEWTON, *seconds}
    assert ways[-1] == fastest


@pytest.mark.parametrize("segments", [8, 32])
def test_a_burn_in_is_no_longer_than_its_errors_ask_for(segments):
    """Errors fall by a tenth in eight steps, down to those of rounding: 45 steps reach a quarter of the tolerance."""
    length, memory, burns = 1024, {}, []
    for _ in range(4):
        each = ScanPass("layer", "forward", memory, length, torch.empty(1, 64), "any")
        each.plan, each.burnt = SegmentPlan(segments, 0, StoppingRule(1e-5, 9)), each.burn
        errors = [max(10.0 ** -((each.burn + sweep * length // segments) / 8), 2e-7) for sweep in range(9)]
        last = next(n for n, error in enumerate(errors) if error <= 1e-5)
        each.outcome = Outcome(1e-5, last, errors[: last + 1], settled=True)
        each.remember()
        burns.append(each.burn)
    assert burns[-1] == 48
