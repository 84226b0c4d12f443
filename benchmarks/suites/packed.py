"""The suite of packed sequences: what torch takes step by step on a CPU."""

from __future__ import annotations

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.timing.packed_layers import PackedLayer, evaluated_packed_layers, packed_layers
from gradfree.benchmarks.timing.timed import Timings

_SIZES = ((64, 30, 512), (256, 40, 256), (64, 100, 256), (32, 250, 128), (32, 500, 128), (32, 1000, 64), (4, 4000, 64))
_BOTH = ((128, 50, 128), (16, 400, 256), (8, 1000, 128))
_LOG_NORMAL = ((64, 50, 64), (64, 100, 64), (64, 50, 256), (8, 300, 32))
_CELLS = ("LSTM", "GRU")
_LAYERS = (
    *(PackedLayer(cell, *size) for size in _SIZES for cell in _CELLS),
    *(PackedLayer(cell, *size, both=True) for size in _BOTH for cell in _CELLS),
    *(PackedLayer(cell, *size, lengths="log-normal") for size in _LOG_NORMAL for cell in _CELLS),
    *(PackedLayer(cell, 32, 60, 128, lengths="sentences") for cell in _CELLS),
)
# torch takes 19 seconds for one pass of the LSTM.
_LONGEST = tuple(PackedLayer(cell, 32, 1000, 128) for cell in _CELLS)
_ROWS = (Row("shooting", "shooting", {}),)

PACKED: Suite = (
    Timings(packed_layers, (*_LAYERS, *_LONGEST), _ROWS, 1, "packed sequences, training, one thread"),
    Timings(packed_layers, _LAYERS[6:12], _ROWS, 2, "packed sequences, training, two threads"),
    Timings(evaluated_packed_layers, _LAYERS[4:18], _ROWS, 1, "packed sequences, evaluation, one thread"),
)
