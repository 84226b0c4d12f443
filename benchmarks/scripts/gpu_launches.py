"""Write the table of launches and waits in docs/start/gpu.md.

    python benchmarks/scripts/gpu_launches.py --counts MODULE:FUNCTION

FUNCTION returns the counts of this process so far: of kernels, "launch", and of waits for the device, "sync". Any CUDA
runtime that counts its calls will do, also one that computes nothing: sweeps end at once, whatever the mismatch is.
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

import gradfree
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
_MARKED = re.compile(r"(<!-- launches -->\n).*?(<!-- end of launches -->)", re.DOTALL)

Counts = Callable[[], Mapping[str, int]]


def _settled(relative: Callable[..., float], *tensors: object) -> float:
    """Read the mismatch, and return that there is none: values may mean nothing."""
    relative(*tensors)
    return 0.0


def counted(kind: str, size: tuple[int, int, int], engine: str, counts: Counts) -> str:
    """Return the launches and waits of a forward and a backward pass of a layer, the third of its kind."""
    batch, steps, width = size
    torch.manual_seed(0)
    layer = getattr(nn, kind)(width, width, batch_first=True).cuda()
    x = torch.randn(batch, steps, width, device="cuda")
    options = ENGINES[engine]
    if options is not None:
        gradfree.create_engine(engine, **options).attach(layer)
    for _ in range(3):
        before = counts()
        layer(x)[0].sum().backward()
    after = counts()
    launches, waits = (after[name] - before[name] for name in ("launch", "sync"))
    return f"{launches:,} / {waits}"


def table(counts: Counts) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| engine | {' | '.join(f'{kind} {size}' for kind in ('GRU',) for size in SIZES)} |"
    yield "|---" * (1 + len(SIZES)) + "|"
    for engine in ENGINES:
        yield f"| `{engine}` | {' | '.join(counted('GRU', size, engine, counts) for size in SIZES)} |"


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--counts", required=True, help="a function that returns the counts so far")
    counts: Counts = resolve_name(parser.parse_args().counts)
    warnings.simplefilter("ignore")
    for module in (multiple_shooting, iteration, newton_backward):
        module.relative = partial(_settled, module.relative)  # type: ignore[attr-defined]
    lines = "".join(f"{line}\n" for line in table(counts))
    text, found = _MARKED.subn(rf"\g<1>{lines}\2", PAGE.read_text(encoding="utf-8"))
    if not found:
        raise SystemExit(f"{PAGE} has no place for the table")
    PAGE.write_text(text, encoding="utf-8")
    print(lines)


if __name__ == "__main__":
    main()
