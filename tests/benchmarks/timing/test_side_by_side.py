"""Interleaved timing: failed steps do not affect others, and sections show ratios and verdicts."""

from report_records import fact_values, section_of
from tiny_suite import CHAIN, HIGHWAY, PLAIN, fake

from gradfree.benchmarks.reports.report import texts
from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.facts import fact
from gradfree.benchmarks.timing.side_by_side import RATIO, statistics
from gradfree.benchmarks.timing.timed import Timing, Timings, timed


@timed(kind="counting", subject="names", metric="time", rounds=3, runs=1, title="letters")
def counting(case):
    """Return steps that report as many seconds as their names have letters, plus one."""
    return {name: lambda name=name: build(name) for name in case.item}


def build(name):
    if name == "unbuildable":
        raise MemoryError("no room")

    def step():
        if name == "failing":
            raise RuntimeError("no such kernel")
        return len(name) + 1.0

    return step


def test_failed_steps_do_not_prevent_the_timing_of_others():
    names = ("abc", "unbuildable", "failing", "abcdefg")
    rows = Timing(timed=counting, item=names, device="cpu", seed=0).run()["rows"]
    assert [row["label"] for row in rows] == list(names)
    assert [row["error"].splitlines()[-1] for row in rows[1:3]] == [
        "MemoryError: no room",
        "RuntimeError: no such kernel",
    ]
    assert (rows[0]["ratio"], rows[3]["time"], rows[3]["ratio"]) == (1.0, 8.0, 2.0)


def section():
    @timed(
        kind="made up",
        subject="size",
        names={"size": "setting", "engine": "row"},
        columns=[column("×", "step time", unit=RATIO), column("letters", "letters")],
        facts=lambda cost, results: iter([fact("letters", "1", len(cost["label"]))]),
    )
    def steps(case):
        return {}

    part = Timings(steps, (1, 2), (PLAIN, CHAIN, HIGHWAY))
    # The baseline's step takes 10 ms in each of three rounds.
    given = [
        {"label": row.label, **statistics([ratio * seconds for seconds in (0.0099, 0.01, 0.0101)], [0.01] * 3)}
        for row, ratio in zip(part.rows, (1.0, 1.5, 0.5), strict=True)
    ]
    lost = [{"label": HIGHWAY.label, "error": "Traceback\nRuntimeError: no"}]
    first, second = part.timing("cpu")
    return section_of(part, dict([fake(first, {"rows": given}), fake(second, {"rows": given[:2] + lost})]))


def test_a_row_without_an_engine_is_shown_as_autograd():
    found = section()
    assert [row[:2] for row in texts(found)][:3] == [
        ["1", "autograd"],
        ["1", "backprop via chain"],
        ["1", "highway_bp k=1"],
    ]
    assert fact_values(found, row="highway_bp k=1", setting="1", metric="step time", unit="× autograd")[0] == 0.5
    assert found.verdicts == [
        "the baseline",
        "1.50× slower than autograd",
        "2.00× faster than autograd",
        "the baseline",
        "1.50× slower than autograd",
        "not timed",
    ]
    assert "2, highway_bp k=1 did not run: RuntimeError: no." in found.remarks
    assert fact_values(found, row="autograd", setting="2", metric="letters")[0] == len(PLAIN.label)
