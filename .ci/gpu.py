"""All that needs a GPU, in one command that can be continued: ``make gpu``.

Stages by priority: the first minutes (:mod:`first_minutes`), tests of exactness, suites of ``gradfree bench``, other
tests. Each has a share of the time. Nothing is installed: torch is enough for the first stage, Lightning for suites,
pytest for tests. All results are in one archive, from which a call on another machine goes on. Reports can be written
from the records elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import progress

ROOT = Path(__file__).resolve().parent.parent
EXACTNESS = (
    "front/test_conformance", "depth/test_exactness", "time/programs/test_random_recurrences", "rows/test_rows",
    "depth/test_residual", "depth/programs/test_random_programs", "algebra/test_time_scan",
    "algebra/test_triton_scan",
)  # fmt: skip
OTHERS = (
    "time/test_recurrent", "time/cells/test_cell_layer",
    "time/cells/test_cell_refusals", "depth/attaching/test_attaching",
    "depth/attaching/test_traces", "depth/attaching/test_plain_backprop", "front/test_precision", "layers/test_layers",
    "algorithms/test_foton", "algorithms/test_foton_second_pass",
    "algorithms/test_feedback_alignment", "algorithms/test_pepita", "algorithms/test_random_feedback",
)  # fmt: skip
SUITES = {"gpu-time": 8, "gpu-depth": 4, "quick": 2}
"""Suites with their shares of the time."""
WITH_DATA = ("highway-bp-table6-small", "foton-depth-small", "dsf-wikitext-small", "text", "forward-only")
"""Suites that need the data sets of $GRADFREE_DATA."""
ALSO_NEEDED = {
    "depth/programs/test_random_programs": "hypothesis",
    "quick": "sklearn",
} | dict.fromkeys(["exactness", "other tests", "slow tests"], "pytest")
"""Package without which a stage, a test file or a suite is skipped; suites need Lightning's torchmetrics, too."""
FIRST = "first minutes"
PATH = [str(ROOT), str(ROOT / ".ci")]
"""Start of the processes' import path."""
PRETEND = [str(ROOT / "tests" / "support"), str(ROOT / "build" / "pretend-entry")]
"""Import path on which torch finds the device of ``pytest --device pretend``; tests set it themselves."""
_AT_ONCE = 4
_TO_END = 30.0
"""Seconds reserved for the end."""
_MOST = 0.4
"""The share of a call that a case of a suite may take; one that takes longer is recorded as too long."""


class Runner:
    """Runs processes of this interpreter in the checkout until a stage's time is over.

    Args:
        out: folder of logs and results.
        end: end of the stage's time.
        last: end of the total time.
        limit: the most seconds of a case of a suite.
    """

    def __init__(self, out: Path, end: float, last: float, limit: float):
        self.out, self.end, self.last, self.limit = out, end, last, limit

    def __call__(
        self, log: str, *arguments: str, path: Sequence[str] = PATH, advanced: Callable[[], bool] = lambda: True
    ) -> int | None:
        """Return the exit code, ``None`` if the time was over before; the output goes to the file ``log``.

        After the stage's time, a process runs on until ``advanced()``: otherwise each call might repeat its start.
        """
        if monotonic() > self.last:
            return None
        # Deterministic cuBLAS, for tests of bitwise equality.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        environment["PYTHONUNBUFFERED"] = "1"
        with (self.out / log).open("a", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
            try:
                while process.poll() is None and monotonic() < (self.end if advanced() else self.last):
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0.5)
                return process.returncode
            finally:
                # Not SIGINT, which fails a test that is importing.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Result(NamedTuple):
    """A stage's problems, and whether its time was over before the end."""

    problems: list[str]
    unfinished: bool


def run_tests(files: tuple[str, ...], device: str, of: str, slow: bool, run: Runner) -> Result:
    """Run the tests without a recorded outcome, several files in parallel."""
    (run.out / "tests").mkdir(exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(lambda name: _run_file(run, device, of, slow, name), files))
    return Result([problem for one in found for problem in one.problems], any(one.unfinished for one in found))


def _run_file(run: Runner, device: str, of: str, slow: bool, name: str) -> Result:
    log, record = f"tests/{Path(name).name}.log", record_of(run.out, name, slow)
    arguments = ["-m", "pytest", f"tests/{name}.py", "--device", device, "-m", "slow" if slow else "not slow"]
    arguments += ["-p", "recorded", "--record", str(record), "--record-of", of]
    arguments += ["-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=120", "-o", "addopts="]
    code, lines = 2, -1
    # Another process as long as tests are left, be it that one has died: 0, 1 and 5 mean that all have an outcome.
    while code not in (None, 0, 1, 5) and lines < (lines := count_lines(record)):
        code = run(log, *arguments)
    failed = [outcome for outcome in progress.results(record, of) if outcome["outcome"] == "failed"]
    problems = [f"{outcome['name']}: {(outcome['said'].splitlines() or [''])[-1]}" for outcome in failed]
    if code not in (None, 0, 1, 5):
        problems.append(f"tests/{name}.py ended with {code}: {run.out / log}")
    return Result(problems, code is None)


def count_lines(path: Path) -> int:
    """Return the number of lines of a file, 0 if there is none."""
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def run_first(device: str, of: str, run: Runner) -> Result:
    """Run the most valuable measurements without a result."""
    file = run.out / "first_minutes.jsonl"
    first = count_lines(file)
    arguments = [".ci/first_minutes.py", str(file), "--device", device, "--of", of, "--seconds"]
    path = PATH + PRETEND * (device == "pretend")
    code, lines = 3, -1
    # After an error, and where the process has died, the rest runs in another one. A case that is longer than the
    # stage may take the whole call.
    while code not in (None, 0) and lines < (lines := count_lines(file)):
        seconds = str(max(0.0, run.end - monotonic()))
        code = run("first_minutes.log", *arguments, seconds, path=path, advanced=lambda: count_lines(file) > first + 2)
    problems = [f"{found['name']}: {found['error']}" for found in progress.results(file, of) if "error" in found]
    if code not in (None, 0, 3):
        problems.append(f"the measurements ended with {code}: {run.out / 'first_minutes.log'}")
    return Result(problems, code is None or code == 3)


def record_of(out: Path, name: str, slow: bool) -> Path:
    """Return the file of outcomes of a test file."""
    return out / "tests" / f"{Path(name).name}{'-slow' if slow else ''}.jsonl"


def run_suite(suite: str, device: str, run: Runner) -> Result:
    """Run the cases without a record."""
    log, folder, jobs = f"{suite}.log", run.out / suite, min(2 * _AT_ONCE, os.cpu_count() or 1)
    before = len(records_in(folder))
    path = PATH + PRETEND * (device == "pretend")
    call = _SUITE.format(suite=suite, folder=str(folder), device=device, jobs=jobs, limit=run.limit)
    code = run(log, "-c", call, path=path, advanced=lambda: len(records_in(folder)) > before)
    failed = [record for record in records_in(folder) if "error" in record]
    problems = [f"{record['case']}: {record['error'].splitlines()[-1]}" for record in failed]
    if code and not problems:
        problems.append(f"the suite ended with {code}: {run.out / log}")
    return Result(problems, code is None)


# Not by the command line, whose parser is another package, and without a limit.
_SUITE = """
from functools import partial
from pathlib import Path
from gradfree.benchmarks.bench import session
from gradfree.benchmarks.running.workers import run_here
from gradfree.benchmarks.sweeps.axes import Sweep
runs = partial(run_here, jobs={jobs}, limit={limit})
session.run(session.RunRequest(Sweep(), suite={suite!r}), Path({folder!r}), 3, {device!r}, None, runs, False, False)
"""


def records_in(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a suite."""
    return progress.whole_lines(folder / "records.jsonl")


def counts(out: Path, of: str) -> str:
    """Return how many tests passed, failed and were skipped."""
    names = [(name, slow) for name in EXACTNESS + OTHERS for slow in (False, True)]
    found = [outcome for name, slow in names for outcome in progress.results(record_of(out, name, slow), of)]
    return ", ".join(f"{n} {what}" for what, n in sorted(Counter(o["outcome"] for o in found).items()))


def digest(device: str) -> str:
    """Return a text that identifies what was tested: the sources, the version of torch and the device.

    Raises:
        SystemExit: the device is not available.
    """
    sys.path[:0] = PATH + PRETEND * (device == "pretend")
    import torch

    from gradfree.devices.hardware import description, is_available

    if not is_available(device):
        sys.exit(f"torch {torch.__version__} finds no device {device} here.")
    found = hashlib.sha256()
    for folder in ("gradfree", "algorithms", "models", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return f"sources {found.hexdigest()[:12]}, torch {torch.__version__}, {description(device)}"


def load_pretend_with_torch() -> None:
    """Register the device of ``pytest --device pretend`` as an entry point of torch, for the suites' processes."""
    folder = Path(PRETEND[-1], "pretend_device-1.dist-info")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pretend-device\nVersion: 1\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text("[torch.backends]\npretend = pretend_device:register\n", encoding="utf-8")


def has_all(name: str) -> bool:
    """Return whether the package that a test file or suite needs is installed; print a message if not."""
    needed = ALSO_NEEDED.get(name)
    if needed is None or find_spec(needed):
        return True
    print(f"{name}: left out, {needed} is not installed")
    return False


class Stage(NamedTuple):
    """A stage: its function, and its share of the time."""

    name: str
    work: Callable[[Runner], Result]
    share: float


def stages(device: str, of: str) -> list[Stage]:
    """Return the stages in their order."""
    by_pytest = find_spec("pytest") is not None
    exactness, others = (tuple(filter(has_all, files)) if by_pytest else () for files in (EXACTNESS, OTHERS))
    suites = SUITES | (dict.fromkeys(WITH_DATA, 1) if os.environ.get("GRADFREE_DATA") else {})
    if missing := [name for name in ("lightning", "torchmetrics") if find_spec(name) is None]:
        print(f"suites: left out, {' and '.join(missing)} not installed")
        suites = {}
    every = [
        Stage(FIRST, partial(run_first, device, of), 9),
        Stage("exactness", partial(run_tests, exactness, device, of, False), 3),
        *(Stage(name, partial(run_suite, name, device), share) for name, share in suites.items()),
        Stage("other tests", partial(run_tests, others, device, of, False), 1),
        Stage("slow tests", partial(run_tests, exactness + others, device, of, True), 1),
    ]
    return [stage for stage in every if has_all(stage.name)]


def run_stages(waiting: list[Stage], out: Path, end: float) -> tuple[list[str], bool]:
    """Run each stage for its share of the time, then unfinished ones again; return these, and whether any failed."""
    failed, limit = False, _MOST * (end - monotonic())
    while waiting and monotonic() < end:
        left = []
        for n, stage in enumerate(waiting):
            begin = monotonic()
            share = stage.share / sum(other.share for other in waiting[n:])
            problems, unfinished = stage.work(Runner(out, begin + share * (end - begin), end, limit))
            pack(out)
            failed |= bool(problems)
            left += [stage] * unfinished
            state = "not done yet" if unfinished else "done"
            line = f"{stage.name}: {state}, {monotonic() - begin:.0f} s"
            line += f", {len(records_in(out / stage.name))} records" if (out / stage.name).is_dir() else ""
            print("\n  ".join([line, *problems]), flush=True)
        waiting = left
    return [stage.name for stage in waiting], failed


def pack(out: Path) -> None:
    """Write all logs and results into one archive beside their folder."""
    Path(shutil.make_archive(f"{out}.part", "gztar", out)).replace(f"{out}.tar.gz")


def unpack(out: Path) -> None:
    """Restore the folder from the archive of an earlier call if only that is there."""
    if Path(f"{out}.tar.gz").exists() and not (out.exists() and any(out.iterdir())):
        shutil.unpack_archive(f"{out}.tar.gz", out)


def main() -> None:
    """Run the stages within the given minutes."""
    begin = monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    if find_spec("torch") is None:
        sys.exit(f"{sys.executable} lacks torch.")
    out = options.out.resolve()
    unpack(out)
    out.mkdir(parents=True, exist_ok=True)
    if options.device == "pretend":
        load_pretend_with_torch()
    of = digest(options.device)
    print(f"{of}; logs and results: {out}, and {out.name}.tar.gz beside it", flush=True)
    left, failed = run_stages(stages(options.device, of), out, begin + 60 * options.minutes - _TO_END)
    print(f"tests: {counts(out, of)}")
    pack(out)
    if left:
        sys.exit(f"The time is over; the same command goes on with: {', '.join(left)}.")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
