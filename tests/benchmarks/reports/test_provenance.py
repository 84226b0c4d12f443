"""The provenance of records, and the warning if environments differ."""

from report_records import ENVIRONMENT

from gradfree.benchmarks.reports.report import SuiteReport


def record(day="2026-01-02", **changes):
    return {"environment": {**ENVIRONMENT, **changes}, "timestamp": f"{day}T03:04:05+00:00"}


def test_every_difference_except_the_device_is_a_warning():
    """Each section has one device, so nothing is mixed."""
    alike = SuiteReport("", [], [record(), record("2026-01-01"), record("2026-01-03")])
    assert list(alike.made) == [
        "3 records, 2026-01-01 to 2026-01-03: gradfree 0.1.0, torch 2.13.0, threads 1, device cpu, commit 0123456"
    ]
    assert list(alike.warnings) == []
    mixed = SuiteReport("", [], [record(), record(torch="2.6.0", dirty=True), record(device="NVIDIA H100")])
    assert len(list(mixed.made)) == 3
    assert list(mixed.warnings) == [
        "The records mix environments, torch: 2.13.0 (2 records), 2.6.0 (1 record).",
        "The records mix environments, commit: 0123456 (2 records), 0123456 with uncommitted changes (1 record).",
    ]


def test_a_warning_names_three_of_many_commits():
    report = SuiteReport("", [], [record(commit=f"{n}" * 7) for n in range(6)])
    assert list(report.warnings) == [
        "The records mix environments, commit: 0000000 (1 record), 1111111 (1 record), 2222222 (1 record) and 3 others."
    ]
