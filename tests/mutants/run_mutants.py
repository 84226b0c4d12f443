"""Try each mutant on a copy of this tree: one of its tests must fail.

``python tests/mutants/run_mutants.py [WORDS...]`` tries all mutants whose names contain one of the words, and writes
what became of them to ``results.txt``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import of_depth
import of_engines
import of_ranks
import of_rows
import of_time
import of_wrappers
from mutant import Mutant

TREE = Path(__file__).resolve().parents[2]
ROOMS = (of_depth, of_rows, of_engines, of_time, of_wrappers, of_ranks)
MUTANTS = tuple(mutant for room in ROOMS for mutant in room.MUTANTS)
RESULTS = Path(__file__).with_name("results.txt")
# In seconds; a mutant may make ranks wait for each other.
LONGEST = 400
FAILED, NO_TESTS = 1, (4, 5)


def copied(tree: Path, folder: Path) -> Path:
    """Copy what git knows of in ``tree``, as it is there now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, check=True, capture_output=True).stdout
    names = b"\0".join(name for name in listed.split(b"\0") if name and (tree / os.fsdecode(name)).is_file())
    packed = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"], cwd=tree, check=True, input=names, capture_output=True
    ).stdout
    subprocess.run(["tar", "-x"], cwd=folder, check=True, input=packed)
    return folder


def caught_by(tree: Path, test: str) -> tuple[bool, str]:
    """Return whether ``test`` fails, and its first failing case, all of it if it does not end, or why there is none."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "tests" / "support")]),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        test,
        "-m",
        "slow or not slow",
        "-x",
        "-n",
        "0",
        "-q",
        "-rf",
        "-p",
        "no:cacheprovider",
    ]
    process = subprocess.Popen(
        [*command, "-W", "ignore"],
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
        return False, f"{test} is not there"
    if process.returncode not in (0, FAILED):
        return False, f"{test} cannot be collected"
    failure = re.search(r"^FAILED (.+?)( - .*)?$", out, re.MULTILINE)
    return process.returncode == FAILED, failure[1] if failure else ""


def tried(mutant: Mutant, tree: Path) -> str:
    """Return what became of ``mutant`` in ``tree``, which is as before then."""
    found = mutant.applied(tree)
    if found is None:
        return "does not fit"
    path, text = found
    before = path.read_text(encoding="utf-8")
    compile(text, str(path), "exec")
    said = []
    for test in mutant.tests:
        path.write_text(text, encoding="utf-8")
        caught, what = caught_by(tree, test)
        path.write_text(before, encoding="utf-8")
        if caught and not caught_by(tree, what)[0]:
            return f"caught by {what.partition('[')[0]}"
        said += [f"{what} fails without it, too" if caught else what] * bool(what)
    return "; ".join(["SURVIVED", *said])


def noted(results: dict[str, str]) -> None:
    """Write ``results`` beside those of other mutants, in the order of the list."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    known = dict(line.split(": ", 1) for line in lines) | results
    text = "".join(f"{mutant.name}: {known[mutant.name]}\n" for mutant in MUTANTS if mutant.name in known)
    RESULTS.write_text(text, encoding="utf-8")


def main() -> int:
    """Try mutants, and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="of names of mutants; all if none is given")
    parser.add_argument("--tree", type=Path, default=TREE, help="the code and its tests, this one's if none is given")
    parser.add_argument("--fit", action="store_true", help="only tell which mutants do not fit")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)]
    survived = 0
    with TemporaryDirectory() as folder:
        tree = copied(options.tree, Path(folder))
        for mutant in chosen:
            if options.fit:
                if mutant.applied(tree) is None:
                    print(mutant.name)
                continue
            begun = time.monotonic()
            result = tried(mutant, tree)
            survived += result.startswith("SURVIVED")
            print(f"{time.monotonic() - begun:5.0f} s  {mutant.name}: {result}", flush=True)
            noted({mutant.name: result})
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
