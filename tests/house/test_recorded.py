"""``make gpu`` goes on where it stopped: a test on record is not run again, until what is tested is something else."""

from pathlib import Path

CI = Path(__file__).parents[2] / ".ci"


def test_tests_on_record_are_not_run_again_until_the_sources_change(pytester):
    pytester.makepyfile("def test_right():\n    pass\n\n\ndef test_wrong():\n    raise ValueError\n")
    pytester.syspathinsert(CI)
    record = pytester.path / "record.jsonl"

    def run(of):
        done = pytester.runpytest_inprocess("-p", "recorded", "--record", str(record), "--record-of", of)
        return {what: n for what, n in done.parseoutcomes().items() if what != "warnings"}

    assert run("one") == {"passed": 1, "failed": 1}
    assert run("one") == {"deselected": 2}
    # What a killed process leaves half written does not count.
    *whole, last = record.read_text().splitlines(keepends=True)
    record.write_text("".join(whole) + last[:10])
    assert run("one") == {"failed": 1, "deselected": 1}
    assert run("another") == {"passed": 1, "failed": 1}
