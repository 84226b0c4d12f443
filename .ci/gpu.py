"""Everything of this checkout that wants a GPU, in one command that goes on where it stopped: ``make gpu``.

First the tests on the device, then the suites of ``gradfree bench``, then the tests that take longest. Nothing is
installed but the wheels of ``make wheels``, and those into build/.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from time import monotonic

import recorded

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / ".whl"
NEEDED = ("torch", "numpy", "lightning", "torchmetrics", "pytest", "jsonargparse", "rich", "jinja2", "datasets")
FILES = (
    "front/test_conformance", "depth/test_exactness", "time/test_recurrent", "time/test_recurrent_in_models",
    "time/test_recurrent_refusals", "time/test_gate_mean", "time/test_recurrent_input", "time/cells/test_cell_layer",
    "time/cells/test_cell_refusals", "time/test_lean", "depth/attaching/test_attaching",
    "depth/attaching/test_trained_parameters", "depth/attaching/test_traces", "depth/attaching/test_plain_backprop",
    "front/test_precision", "algebra/test_time_scan", "algebra/test_triton_scan", "layers/test_layers",
    "algorithms/test_foton", "algorithms/test_foton_second_pass", "algorithms/test_foton_refusals",
    "algorithms/test_feedback_alignment", "algorithms/test_pepita", "algorithms/test_random_feedback",
    "algorithms/test_orthogonal_backprop", "algorithms/test_layered_engines",
)  # fmt: skip
SUITES = ("scan", "gpu-time", "gpu-depth", "quick", "lightning", "rnn")
WITH_DATA = ("highway-bp-table6-small", "foton-depth-small", "dsf-wikitext-small", "text", "forward-only")
"""Suites that need the data sets of $GRADFREE_DATA."""
_AT_ONCE = 4
_TO_END = 30.0
"""Seconds for a process to end in once it is asked to."""


class TimeIsOver(Exception):
    """A process was stopped; what it finished is on record."""


class Runner:
    """Runs processes of this interpreter on the checkout until the time is over.

    Args:
        out: folder of logs and results.
        seconds: from now.
        extra: folder of packages that the interpreter lacks.
    """

    def __init__(self, out: Path, seconds: float, extra: Path):
        self.out, self._end = out, monotonic() + seconds - _TO_END
        path = os.pathsep.join(map(str, (ROOT, ROOT / ".ci", extra)))
        # cuBLAS adds in the same order each time, which tests for equal bits need.
        self._environment = os.environ | {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def __call__(self, log: str, *arguments: str) -> int:
        """Return the exit code; everything printed goes to the file ``log``.

        Raises:
            TimeIsOver: before it had ended.
        """
        if monotonic() > self._end:
            raise TimeIsOver
        with (self.out / log).open("a", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT, env=self._environment, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
            try:
                return process.wait(self._end - monotonic())
            except subprocess.TimeoutExpired:
                raise TimeIsOver from None
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is still running of ``process`` and its children: by Ctrl-C first, so that it can tidy up."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(_TO_END / 2)


def run_tests(run: Runner, device: str, of: str, slow: bool) -> list[str]:
    """Run those that have no outcome yet, some files at a time; return what went wrong.

    Raises:
        TimeIsOver: there was none left for some.
    """
    (run.out / "tests").mkdir(exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        files = [pool.submit(_run_file, run, device, of, slow, name) for name in FILES]
    return [problem for file in files for problem in file.result()]


def _run_file(run: Runner, device: str, of: str, slow: bool, name: str) -> list[str]:
    log, record = f"tests/{Path(name).name}.log", record_of(run.out, name, slow)
    arguments = ["-m", "pytest", f"tests/{name}.py", "--device", device, "-m", "slow" if slow else "not slow"]
    arguments += ["-p", "recorded", "--record", str(record), "--record-of", of]
    code = run(log, *arguments, "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=120", "-o", "addopts=")
    failed = [outcome for outcome in recorded.read(record, of) if outcome["outcome"] == "failed"]
    problems = [f"{outcome['test']}: {(outcome['said'].splitlines() or [''])[-1]}" for outcome in failed]
    # 0: all passed; 1: some failed, as the record tells; 5: none was left.
    return problems if code in (0, 1, 5) else [*problems, f"tests/{name}.py ended with {code}: {run.out / log}"]


def record_of(out: Path, name: str, slow: bool) -> Path:
    """Return the file of outcomes of a file of tests."""
    return out / "tests" / f"{Path(name).name}{'-slow' if slow else ''}.jsonl"


def run_suite(run: Runner, device: str, suite: str) -> list[str]:
    """Run the cases that have no record yet, and report; return what went wrong.

    Raises:
        TimeIsOver: there was none left for some.
    """
    arguments = ("bench", "run", "--suite", suite, "--device", device, "--out", str(run.out / suite))
    jobs = str(min(2 * _AT_ONCE, os.cpu_count() or 1))
    log = f"{suite}.log"
    code = run(log, "-c", "from gradfree.cli import main; main()", *arguments, "--jobs", jobs)
    return [f"bench run ended with {code}: {run.out / log}"] if code else []


def counts(out: Path, of: str) -> str:
    """Return how many tests passed, failed and were skipped."""
    found = [o for name in FILES for slow in (False, True) for o in recorded.read(record_of(out, name, slow), of)]
    return ", ".join(f"{n} {what}" for what, n in sorted(Counter(o["outcome"] for o in found).items()))


def digest(device: str) -> str:
    """Return what outcomes of tests are of: the sources, the version of torch and the device."""
    import torch

    found = hashlib.sha256()
    for folder in ("gradfree", "algorithms", "models", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return f"sources {found.hexdigest()[:12]}, torch {torch.__version__}, {name}"


def lacking(extra: Path) -> list[str]:
    """Return the packages that neither the interpreter has nor ``extra``."""
    there = {found.name.lower() for found in metadata.distributions(path=[*sys.path, str(extra)])}
    return [name for name in NEEDED if name not in there]


def refuse_what_is_missing(device: str, extra: Path) -> None:
    """End with one line if the device is not there, or packages that no wheel brings to ``extra``."""
    if lacking(extra) and (wheels := [str(path) for path in sorted(WHEELS.glob("*.whl"))]):
        command = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        subprocess.run([sys.executable, *command, "--target", str(extra), *wheels], check=True)
    if missing := lacking(extra):
        sys.exit(f"{sys.executable} lacks {', '.join(missing)}; `make wheels` on a machine with a network brings them.")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device here.")


def main() -> None:
    """Do what the budget of minutes allows."""
    begin = monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    out, device = options.out.resolve(), options.device
    out.mkdir(parents=True, exist_ok=True)
    extra = ROOT / "build" / "wheels"
    refuse_what_is_missing(device, extra)
    run, of = Runner(out, 60 * options.minutes - (monotonic() - begin), extra), digest(device)
    suites = SUITES + (WITH_DATA if os.environ.get("GRADFREE_DATA") else ())
    stages: Mapping[str, Callable[[], list[str]]] = {
        "tests": partial(run_tests, run, device, of, slow=False),
        **{suite: partial(run_suite, run, device, suite) for suite in suites},
        "slow tests": partial(run_tests, run, device, of, slow=True),
    }
    print(f"{of}; logs and results: {out}", flush=True)
    left, failed = [], []
    for name, stage in stages.items():
        try:
            problems = stage()
        except TimeIsOver:
            left.append(name)
            continue
        failed += problems
        print("\n  ".join([f"{name}: {'failures' if problems else 'done'}", *problems]), flush=True)
    print(f"tests: {counts(out, of)}")
    if left:
        sys.exit(f"The time is over; the same command goes on with: {', '.join(left)}.")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
