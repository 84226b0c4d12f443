"""``gradfree bench compare``: two sets of records whose differences are known."""

import pytest
from report_records import ENVIRONMENT, RECORDS, failed, texts, timed, trained
from tiny_suite import CHAIN, HIGHWAY, PLAIN, speed, training

from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.reports.record_diff import compare, environment_changes
from gradfree.cli import main

A = list(RECORDS.values())
OTHER = dict(
    [
        *trained(PLAIN, [96, 97, 98], [95, 96, 97]),
        *trained(CHAIN, [96, 97, 97], [97, 97.1, 96.9]),
        *trained(HIGHWAY, [90, 91], [70, 81]),
        timed((1.0, 4), (0.625, 10), (0.5, 10)),
    ]
)
B = list(OTHER.values())


def test_scores_are_compared_seed_by_seed():
    """A margin is Student's t, 4.303 or 12.706, times the differences' standard deviation over √n."""
    scores, *_ = compare(A, B)
    assert scores.title == "test accuracy (%), device: cpu"
    assert texts(scores) == [
        ["points", "backprop", "3", "96.00", "96.00", "+0.00 ± 0.00"],
        ["points", "backprop via chain", "3", "96.00", "97.00", "+1.00 ± 0.25"],
        ["points", "highway_bp k=1", "2", "85.00", "75.50", "-9.50 ± 6.35"],
    ]
    assert scores.remarks == [
        "Higher after: points backprop via chain.",
        "Lower after: points highway_bp k=1.",
        "Exactly the same with every seed: 1 of 3.",
    ]


def test_times_are_compared_as_ratios_between_the_farthest_quartiles():
    _, times, _ = compare(A, B)
    assert times.title == "times, device: cpu"
    assert texts(times) == [
        ["points", "backprop", "10.0", "10.0", "1.00", "0.98–1.02"],
        ["points", "backprop via chain", "12.5", "6.25", "0.50", "0.49–0.51"],
        ["points", "highway_bp k=1", "5.00", "5.00", "1.00", "0.96–1.04"],
    ]
    assert times.remarks == [
        "Faster after, beyond the quartiles, in 1 of 3 rows: points backprop via chain.",
        "Peak memory after, as a multiple of that before, where it differs: points backprop via chain (2.00×).",
    ]
    slower = compare(B, A)[1]
    assert slower.remarks[0] == "Slower after, beyond the quartiles, in 1 of 3 rows: points backprop via chain."


def test_what_is_in_one_only_is_listed():
    *_, unmatched = compare(A, B)
    assert texts(unmatched) == [["points highway_bp k=1", "training, cpu", "3", "2"]]
    nothing = compare(A, list(dict(trained(PLAIN, [1], [1], device="cuda")).values()))
    assert [section.title for section in nothing] == ["not in both"]
    assert texts(nothing[0])[-1] == ["points backprop", "training, cuda", "0", "1"]


def test_failed_cases_count_as_missing():
    lost = OTHER | dict([failed(training(PLAIN, seed=0)), failed(speed())])
    scores, unmatched = compare(A, list(lost.values()))
    assert texts(scores)[0][:3] == ["points", "backprop", "2"]
    assert texts(unmatched)[0] == ["points backprop", "training, cpu", "3", "2, 1 failed"]
    assert texts(unmatched)[-1] == ["points all rows", "speed, cpu", "1", "0, 1 failed"]


def test_the_same_records_do_not_differ():
    scores, times = compare(A, A)
    assert scores.remarks == ["Exactly the same with every seed: 3 of 3."]
    assert times.remarks == []
    assert list(environment_changes(A, A)) == []


def test_environments_that_differ_are_named():
    def made(records, **changes):
        return [{**record, "environment": {**ENVIRONMENT, **changes}} for record in records]

    assert list(environment_changes(made(A), made(B, torch="2.6.0", commit="fedcba987"))) == [
        "The environments differ, torch: 2.13.0 before; 2.6.0 after.",
        "The environments differ, commit: 0123456 before; fedcba9 after.",
    ]
    mixed = [*made(A[:1], torch="2.6.0"), *made(A[1:])]
    assert next(environment_changes(mixed, made(B))).startswith("before: The records mix environments, torch: 2.6.0 (1")


def write(path, records):
    file = RecordFile(path)
    path.parent.mkdir()
    for record in records:
        file.append(record)


def test_the_command_takes_folders_and_files(tmp_path, capsys):
    write(tmp_path / "old" / "records.jsonl", A)
    write(tmp_path / "new" / "some.jsonl", B)
    main(["bench", "compare", str(tmp_path / "old"), str(tmp_path / "new" / "some.jsonl")])
    printed = capsys.readouterr().out
    assert "+1.00 ± 0.25" in printed
    assert "0.49–0.51" in printed
    assert f"before: {tmp_path / 'old'}" in printed.replace("\n", "")


@pytest.mark.parametrize(
    ("others", "said"), [(B, False), ([RECORDS[speed().id] | {"config": {"device": "cpu"}}], True)]
)
def test_sets_with_nothing_in_common_are_said_to_be_so(others, said, tmp_path, capsys):
    write(tmp_path / "old" / "records.jsonl", A)
    write(tmp_path / "new" / "records.jsonl", others)
    main(["bench", "compare", str(tmp_path / "old"), str(tmp_path / "new")])
    assert ("Nothing can be compared: no case has results in both." in capsys.readouterr().out) is said


@pytest.mark.parametrize(
    ("content", "words"), [(None, "there is no"), ("", "has no records"), ("no record\n", "line 1 is no record")]
)
def test_a_set_that_cannot_be_read_is_an_error(content, words, tmp_path, capsys):
    write(tmp_path / "old" / "records.jsonl", A)
    other = tmp_path / "other.jsonl"
    if content is not None:
        other.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "compare", str(tmp_path / "old"), str(other)])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
