"""Apply each mutant to a copy of this tree: one of its tests must fail.

``python tests/mutants/run_mutants.py [WORDS...]`` runs all mutants whose names contain one of the words, and writes
their results to ``results.txt``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from mutant import Mutant, read

TREE = Path(__file__).resolve().parents[2]
ROOMS = ("depth", "rows", "engines", "time", "wrappers", "ranks")
MUTANTS = tuple(mutant for room in ROOMS for mutant in read(Path(__file__).with_name(f"{room}.txt")))
RESULTS = Path(__file__).with_name("results.txt")
# Time limit in seconds, since a mutant may cause a deadlock between ranks.
LONGEST = 400
FAILED, NO_TESTS = 1, (4, 5)


def copied(folder: Path) -> Path:
    """Copy the files that git tracks, with uncommitted changes, into ``folder``."""
    listed = subprocess.run(["git", "ls-files"], cwd=TREE, check=True, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        if (TREE / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TREE / name, folder / name)
    return folder


def caught_by(tree: Path, test: str) -> tuple[bool, str]:
    """Return whether ``test`` fails, and its first failing case (``test`` itself after a timeout) or a reason."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "tests" / "support")]),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    options = ["-x", "-n", "0", "-q", "-rf", "-p", "no:cacheprovider", "-W", "ignore"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", test, "-m", "slow or not slow", *options],
        cwd=tree,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return True, test
    if process.returncode in NO_TESTS:
        return False, f"{test} does not exist"
    if process.returncode not in (0, FAILED):
        return False, f"{test} cannot be collected"
    failure = re.search(r"^FAILED (.+?)( - .*)?$", out, re.MULTILINE)
    return process.returncode == FAILED, failure[1] if failure else ""


def run_mutant(mutant: Mutant, tree: Path) -> str:
    """Apply ``mutant`` in ``tree``, run its tests, undo it, and return the result."""
    found = mutant.applied(tree)
    if found is None:
        return "does not fit"
    path, text = found
    before = path.read_text(encoding="utf-8")
    compile(text, str(path), "exec")
    reasons = []
    for test in mutant.tests:
        path.write_text(text, encoding="utf-8")
        caught, what = caught_by(tree, test)
        path.write_text(before, encoding="utf-8")
        if caught and not caught_by(tree, what)[0]:
            return f"caught by {what.partition('[')[0]}"
        reasons += [f"{what} fails without it, too" if caught else what] * bool(what)
    return "; ".join(["SURVIVED", *reasons])


def write_results(results: dict[str, str]) -> None:
    """Merge ``results`` into the file of results, in the order of the mutants."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    starts = {mutant.name: f"{mutant.name}: " for mutant in MUTANTS}
    known = {n: line.removeprefix(start) for n, start in starts.items() for line in lines if line.startswith(start)}
    known |= results
    text = "".join(f"{mutant.name}: {known[mutant.name]}\n" for mutant in MUTANTS if mutant.name in known)
    RESULTS.write_text(text, encoding="utf-8")


def main() -> int:
    """Run the mutants and print their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of names of mutants; default: all")
    parser.add_argument("--fit", action="store_true", help="only list the mutants that do not fit")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)]
    survived = 0
    with TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for mutant in chosen:
            if options.fit:
                if mutant.applied(tree) is None:
                    print(mutant.name)
                continue
            begun = time.monotonic()
            result = run_mutant(mutant, tree)
            survived += result.startswith("SURVIVED")
            print(f"{time.monotonic() - begun:5.0f} s  {mutant.name}: {result}", flush=True)
            write_results({mutant.name: result})
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
