"""The suites of recurrences that users write themselves."""

from __future__ import annotations

from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.timing.cells import Sequences, cells
from gradfree.benchmarks.timing.narrow_steps import NarrowSequences, narrow_steps
from gradfree.benchmarks.timing.timed import Timings

_SIZES = (
    *((1, 1024, 64), (4, 1024, 64), (1, 4096, 64), (8, 4096, 64)),
    *((1, 2048, 256), (16, 512, 128), (32, 368, 64), (1, 16384, 64)),
)

_SEQUENCES = tuple(Sequences(*size) for size in _SIZES)

CELLS: Suite = (
    Timings(cells, _SEQUENCES, (), 1, "recurrences of one's own, one thread"),
    Timings(cells, (_SEQUENCES[0], _SEQUENCES[5], _SEQUENCES[7]), (), 2, "recurrences of one's own, two threads"),
)

_NARROW = (
    *(("compressor", 1), ("compressor", 8), ("state variable filter", 1), ("state variable filter", 4)),
    ("ladder filter", 1),
)

NARROW: Suite = (
    Timings(
        narrow_steps,
        (*(NarrowSequences(*each, 44_100) for each in _NARROW), NarrowSequences("Van der Pol", 4, 4_000)),
        (),
        1,
        "narrow recurrences with long memory",
    ),
)
