"""Write the tables of launches and waits in docs/start/gpu.md.

    python benchmarks/scripts/gpu_launches.py --counts MODULE:FUNCTION

FUNCTION returns the counts of this process so far: of kernels, "launch", and of waits for the device, "sync". Any CUDA
runtime that counts its calls will do, also one that computes nothing: sweeps end at once, whatever the mismatch is, and
compiled code runs, whatever its results are.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import torch
from torch import nn

from gradfree import create_engine, scan
from gradfree.benchmarks.timing.cells import LayerNormGRU, loop
from gradfree.loops import compiled
from gradfree.newton import iteration, newton_backward
from gradfree.segments import multiple_shooting

PAGE = Path(__file__).parents[2] / "docs" / "start" / "gpu.md"
SIZES = (1, 4096, 64), (1, 16384, 256), (8, 4096, 256), (32, 1024, 512)
ENGINES: Mapping[str, Mapping[str, object] | None] = {
    "autograd": None,
    "shooting": {},
    "newton": {"max_sweeps": 9},
    "dsf": {},
    "highway_bp": {"iterations": 2},
    "backprop": {},
}
CELLS: Mapping[tuple[int, int, int], int] = {(1, 4096, 64): 64, (32, 1024, 256): 32, (256, 365, 256): 8}
"""Sizes of a cell of a user's own, and the number of segments: its choice by times means nothing here."""

Counts = Callable[[], Mapping[str, int]]
Runner = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _settled(relative: Callable[..., float], *tensors: object) -> float:
    """Read the mismatch, and return that there is none: values may mean nothing."""
    relative(*tensors)
    return 0.0


def _agreed(agrees: Callable[..., bool], *chunk: object) -> bool:
    """Compare what is compiled, and return that it agrees: values may mean nothing."""
    agrees(*chunk)
    return True


def counted(kind: str, size: tuple[int, int, int], engine: str, counts: Counts) -> str:
    """Return the launches and waits of a forward and a backward pass of a layer, the third of its kind."""
    batch, steps, width = size
    torch.manual_seed(0)
    layer = getattr(nn, kind)(width, width, batch_first=True).cuda()
    x = torch.randn(batch, steps, width, device="cuda")
    options = ENGINES[engine]
    if options is not None:
        create_engine(engine, **options).attach(layer)
    for _ in range(3):
        before = counts()
        layer(x)[0].sum().backward()
    return _difference(before, counts())


def _difference(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    launches, waits = (after[name] - before[name] for name in ("launch", "sync"))
    return f"{launches:,} / {waits}"


def table(counts: Counts) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| engine | {' | '.join(f'{kind} {size}' for kind in ('GRU',) for size in SIZES)} |"
    yield "|---" * (1 + len(SIZES)) + "|"
    for engine in ENGINES:
        yield f"| `{engine}` | {' | '.join(counted('GRU', size, engine, counts) for size in SIZES)} |"


def counted_cell(size: tuple[int, int, int], run: Runner, counts: Counts) -> str:
    """Return the launches and waits of a forward and a backward pass of a LayerNorm-GRU, the third of its kind."""
    batch, steps, width = size
    torch.manual_seed(0)
    cell, start = LayerNormGRU(width).cuda(), torch.zeros(batch, width, device="cuda")
    xs = torch.randn(steps, batch, cell.read.in_features - width, device="cuda")
    for _ in range(3):
        before = counts()
        run(cell, start, xs)[1].square().mean().backward()
    return _difference(before, counts())


def table_of_cells(counts: Counts) -> Iterator[str]:
    """Yield the lines of the table of cells of a user's own."""
    yield f"| | {' | '.join(map(str, CELLS))} |"
    yield "|---" * (1 + len(CELLS)) + "|"
    rows: Mapping[str, Callable[[int], Runner]] = {
        "Python loop": lambda _: loop,
        "`scan` in 64, 32 and 8 segments": lambda n: partial(scan, engine=create_engine("shooting", segments=n)),
        "the same, `compile=True`": lambda n: partial(scan, engine=create_engine("shooting", segments=n), compile=True),
        "the loop, `compile=True`": lambda _: partial(scan, engine="backprop", compile=True),
    }
    for label, row in rows.items():
        yield f"| {label} | {' | '.join(counted_cell(size, row(n), counts) for size, n in CELLS.items())} |"


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--counts", required=True, help="a function that returns the counts so far")
    counts: Counts = resolve_name(parser.parse_args().counts)
    warnings.simplefilter("ignore")
    for module in (multiple_shooting, iteration, newton_backward):
        for name in {"relative", "relative_to_states"} & vars(module).keys():
            setattr(module, name, partial(_settled, getattr(module, name)))
    compiled.agrees = partial(_agreed, compiled.agrees)  # type: ignore[attr-defined]
    for name, lines in {"launches": table(counts), "launches of cells": table_of_cells(counts)}.items():
        _write(name, "".join(f"{line}\n" for line in lines))


def _write(name: str, lines: str) -> None:
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    text, found = marked.subn(rf"\g<1>{lines}\2", PAGE.read_text(encoding="utf-8"))
    if not found:
        raise SystemExit(f"{PAGE} has no place for the table of {name}")
    PAGE.write_text(text, encoding="utf-8")
    print(lines)


if __name__ == "__main__":
    main()
