"""Compare the gradients of two versions of gradfree, and autograd's, over random programs.

``python tests/side_by_side/compare.py --old 5580417 --programs 20000`` compares the tree that this file lies in with a
commit of it. Both run the programs of this tree, each in processes of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from pprint import pformat
from tempfile import TemporaryDirectory
from typing import Any

import torch
from drawn_programs import Drawn, Program, drawn
from torch import Tensor

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
SAME, EXACT, ROUGH = 1e-12, 1e-10, 1e-4
PIECE = 250
# What torch's own functions make zeros of, and autograd leaves out where nothing is given to them.
MAKE_ZEROS = {"reentrant", "custom view", "square", "halving"}


def extracted(commit: str, folder: Path) -> Path:
    """Write the files of ``commit`` to ``folder``."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=TREE, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def run(tree: Path, first: int, last: int, file: Path) -> list[Any]:
    """Return what the programs from ``first`` to ``last`` come to with the gradfree that lies in ``tree``."""
    path = os.pathsep.join([str(tree), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "run_programs.py"), str(first), str(last), str(file)]
    subprocess.run(command, check=True, env=environment, cwd=HERE)
    return torch.load(file, weights_only=True)


def difference(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], zeros: bool) -> float:
    """Return the largest difference, relative to the largest number; infinite where a gradient is missing.

    What the program has asked for in vain, and has gone on without, is left out.
    """
    numbers = [t.nan_to_num(0, 0, 0).abs().max() for t in expected.values() if t is not None and t.numel()]
    largest = max(map(float, numbers), default=0.0)
    worst = 0.0
    for name in actual.keys() & expected.keys():
        a, e = actual[name], expected[name]
        if (a is None) != (e is None):
            if zeros and all(t is None or not t.any() for t in (a, e)):
                continue
            return float("inf")
        if a is not None and e is not None and e.numel():
            known = e.isfinite()
            if not torch.equal(a.isfinite(), known):
                return float("inf")
            worst = max(worst, float((a - e)[known].abs().max()) if known.any() else 0.0)
    return worst / max(largest, 1e-9)


def is_single(program: Drawn) -> bool:
    """Tell whether a program computes anything in single precision."""
    model = program.model
    if not isinstance(model, Program):
        return False
    return "single" in model.between or any("float" in block.operations for block in (*model.blocks, *model.more))


def makes_zeros(program: Drawn) -> bool:
    """Tell whether autograd itself may have zeros or nothing in the same place."""
    model = program.model
    if not isinstance(model, Program):
        return False
    blocks = (*model.blocks, *model.more)
    return model.around == "reentrant" or any(MAKE_ZEROS & {*block.operations} for block in blocks)


def kind_of(message: str) -> str:
    """Return a message without what is one model's own."""
    message = re.sub(r"'?\b(blocks|more|layers)(\.[\w.]+)*'?", "…", message.replace("\n", " "))
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?|\((…|, )*\)", "…", message)[:110]


@dataclass
class Comparison:
    """What came of all programs so far.

    Attributes:
        ends: how often which ends came together, old and new.
        worst: the largest differences, by what is compared.
        found: by kind, how often, and the first program of it.
    """

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)
    found: dict[str, list[int]] = field(default_factory=dict)

    def add(self, number: int, plain: tuple[str, Any], old: tuple[str, Any], new: tuple[str, Any]) -> None:
        """Take in one program."""
        program = drawn(number)
        zeros, single = makes_zeros(program), is_single(program)
        self.ends[old[0], new[0]] += 1
        if old[0] == new[0] == "gradients":
            where = "in an exact setting" if program.exact else "in an inexact setting"
            apart = self.measure(f"old and new, {where}", number, old, new, zeros, single)
            if apart > (ROUGH if single else SAME):
                self.note(f"DIFFERENT from the old ones {where}", number)
        elif old[0] == "gradients":
            self.note(f"newly {new[0]}: {kind_of(new[1])}", number)
        elif new[0] == "gradients":
            self.note(f"gradients now, {old[0]} before: {kind_of(old[1])}", number)
        elif old[0] != new[0]:
            self.note(f"{new[0]} now, {old[0]} before: {kind_of(new[1])}", number)
        for name, end in (("old", old), ("new", new)):
            if end[0] != "gradients":
                continue
            if plain[0] != "gradients":
                self.note(f"{name}: NO ERROR, but of autograd's: {kind_of(plain[1])}", number)
            elif program.exact:
                apart = self.measure(f"{name} and autograd", number, end, plain, zeros, single)
                if apart > (ROUGH if single else EXACT):
                    self.note(f"{name}: WRONG", number)
        if new[0] == "error" and plain[0] == "gradients":
            self.note(f"new: an error of torch's, none without an engine: {kind_of(new[1])}", number)

    def measure(
        self, name: str, number: int, end: tuple[str, Any], expected: tuple[str, Any], zeros: bool, single: bool
    ) -> float:
        """Return the difference of two ends, and remember the largest."""
        apart = difference(end[1], expected[1], zeros)
        name += " (in single precision)" if single else ""
        if apart > self.worst.get(name, (-1.0, 0))[0]:
            self.worst[name] = apart, number
        return apart

    def note(self, kind: str, number: int) -> None:
        """Remember that a program is of a kind."""
        self.found.setdefault(kind, []).append(number)

    def lines(self) -> Iterator[str]:
        """Yield the report."""
        yield f"{self.ends.total()} programs"
        for (old, new), count in self.ends.most_common():
            yield f"{count:7} old: {old}, new: {new}"
        for name, (apart, number) in sorted(self.worst.items()):
            yield f"{apart:10.1e} at most between {name} (program {number})"
        for kind, numbers in sorted(self.found.items(), key=lambda item: (item[0][:5], -len(item[1]))):
            yield f"{len(numbers):7} {kind} ({', '.join(map(str, numbers[:6]))})"


def described(number: int) -> str:
    """Return a program as it is written in Python."""
    return pformat(drawn(number), width=118, compact=True)


def main() -> int:
    """Compare, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", default="5580417", help="the commit to compare with")
    parser.add_argument("--new", type=Path, default=TREE, help="the tree to compare, this one if none is given")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--programs", type=int, default=20000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--show", type=int, help="print this program and what comes of it, and nothing else")
    options = parser.parse_args()
    comparison = Comparison()
    with TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        old = extracted(options.old, Path(folder) / "old")
        if options.show is not None:
            print(described(options.show))
            for name, tree in (("old", old), ("new", options.new)):
                _, plain, end = run(tree, options.show, options.show + 1, Path(folder) / f"{name}.pt")[0]
                print("without an engine:", plain, name + ":", end, sep="\n")
            return 0
        last = options.first + options.programs
        pieces = [(at, min(at + PIECE, last)) for at in range(options.first, last, PIECE)]

        def compared(piece: tuple[int, int]) -> list[tuple[Any, Any]]:
            files = [Path(folder) / f"{name}{piece[0]}.pt" for name in ("before", "after")]
            ends = [run(tree, *piece, file) for tree, file in zip((old, options.new), files, strict=True)]
            for file in files:
                file.unlink()
            return list(zip(*ends, strict=True))

        for pairs in pool.map(compared, pieces):
            for (number, plain, before), (_, _, after) in pairs:
                comparison.add(number, plain, before, after)
    print(*comparison.lines(), sep="\n")
    print(*(f"\n{kind}\n{described(numbers[0])}" for kind, numbers in comparison.found.items()), sep="\n")
    return int(any(word in kind for kind in comparison.found for word in ("WRONG", "NO ERROR", "DIFFERENT")))


if __name__ == "__main__":
    sys.exit(main())
