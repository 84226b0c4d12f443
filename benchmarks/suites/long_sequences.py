"""Suites of long sequences, on which recurrent layers can be trained in parallel over time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from gradfree.benchmarks.data.bundled import CONTEXT, Joined, pydoc
from gradfree.benchmarks.data.stored import Images
from gradfree.benchmarks.data.synthetic import Synthetic, adding_pixels, parity_pixels
from gradfree.benchmarks.data.text import Text
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import BACKPROP, DSF, DSF_GATE, TRUNCATED, iterated
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tasks.catalogue import ADDING, PARITY, PYDOC_GRU, TINYSHAKESPEARE
from gradfree.benchmarks.tasks.metrics import digit_accuracy
from gradfree.benchmarks.tasks.task import Score, Task, TextTask
from gradfree.benchmarks.timing.evaluated_program import Program, evaluated_program
from gradfree.benchmarks.timing.recurrent_layers import RecurrentLayer, evaluated_layers, layer_precision, long_layers
from gradfree.benchmarks.timing.timed import Timings
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.benchmarks.training.courses import courses
from gradfree.benchmarks.training.target import TimeToTarget

SHOOTING = Row("shooting", "shooting", {})
_VIA_CHAIN = Row("backprop via chain", "backprop", {})
_LAYER_ROWS = (replace(_VIA_CHAIN, label="backprop"), DSF, *iterated("highway_bp", 2), SHOOTING)
_ROWS = (BACKPROP, _VIA_CHAIN, DSF_GATE, *iterated("highway_bp", 2), SHOOTING)
_EXACT = (BACKPROP, _VIA_CHAIN, SHOOTING)
_NEWTON = Row("newton", "newton", {})
# With enough sweeps to converge: by default it runs torch's layers on a CPU sequentially.
_SWEPT = Row("newton, swept", "newton", {"max_sweeps": 64})
_PARALLEL = (
    _LAYER_ROWS[0],
    SHOOTING,
    _SWEPT,
    Row("newton gate, swept", "newton", {"jacobian": "gate", "max_sweeps": 64}),
    Row("deeppcr", "deeppcr", {}),
)

TINYSHAKESPEARE_LONG = TextTask(
    name="tinyshakespeare_long",
    data=Text("tinyshakespeare", unit="character", vocabulary=66, length=4096, held_out=1000),
    model="recurrent_lm",
    options={"vocab_size": 66, "cell": "gru", "layers": 1, "width": 128, "carry": True},
    score=TINYSHAKESPEARE.score,
    learning_rate=2e-2,  # of 5e-3 (7.66), 1e-2 (7.30), 2e-2 (7.13), one seed, 200 steps
    batch_size=1,
    steps=100,
    evaluations=20,
)

PYDOC_LONG = TextTask(
    name="pydoc_long",
    data=Joined(pydoc, 2048 // CONTEXT),
    model="recurrent_lm",
    options={"vocab_size": 128, "cell": "gru", "layers": 1, "width": 64, "carry": True},
    score=PYDOC_GRU.score,
    learning_rate=5e-3,  # not tuned: all of its rows are exact
    batch_size=1,
    steps=100,
    evaluations=10,
)

ADDING_LONG = replace(
    ADDING,
    name="adding_long",
    data=Synthetic(adding_pixels, length=2048, train=2000, held_out=100),
    options={**ADDING.options, "memory": 2048},
    learning_rate=1e-2,
    batch_size=8,
    steps=200,
)

PARITY_LONG = replace(
    PARITY,
    name="parity_long",
    data=Synthetic(parity_pixels, length=2048, train=2000, held_out=100),
    options={**PARITY.options, "memory": 2048},
    batch_size=8,
    steps=200,
)


def _pixels(name: str, column: str, channels: int, train: int) -> Task:
    return Task(
        name=f"{name}_pixels",
        data=Images(name, column=column, train=train, validation=2000),
        model="pixel_classifier",
        options={"in_channels": channels, "num_classes": 10, "cell": "gru", "width": 64, "memory": 784},
        score=Score("accuracy", "%", digit_accuracy, factor=100.0),
        learning_rate=5e-3,  # not tuned: all of its rows are exact
        batch_size=8,
        steps=600,
    )


MNIST_PIXELS = _pixels("mnist", "image", 1, 58000)
CIFAR10_PIXELS = _pixels("cifar10", "img", 3, 48000)
LONG_TASKS = (TINYSHAKESPEARE_LONG, MNIST_PIXELS, CIFAR10_PIXELS, ADDING_LONG, PARITY_LONG)

_LAYERS = (
    *(RecurrentLayer("GRU", *size) for size in ((1, 4096, 64), (1, 16384, 64), (8, 4096, 64), (1, 4096, 256))),
    *(RecurrentLayer("LSTM", *size) for size in ((1, 4096, 64), (1, 16384, 128))),
    *(RecurrentLayer("GRU", *size) for size in ((8, 1024, 256), (32, 256, 256), (8, 1024, 64))),
    RecurrentLayer("GRU", 8, 1024, 64, batch_first=False),
)
# Without deeppcr, whose steps take a hundred times as long as those in segments.
_TEXT = Comparison(TINYSHAKESPEARE_LONG, (*_ROWS, TRUNCATED, *iterated("fixed_point", 2), _SWEPT))


def _layers(layers: tuple[RecurrentLayer, ...], rows: tuple[Row, ...], threads: int = 1, compiled: int = 0) -> Timings:
    """Return the timing of layers, with a compiled loop for float32 ones of up to ``compiled`` steps: it takes long."""
    lengths = sorted({layer.steps for layer in layers})
    title = f"recurrent layers, {lengths[0]} to {lengths[-1]} steps"

    def more(layer: RecurrentLayer) -> dict[str, bool]:
        return {"compiled": layer.steps <= compiled and layer.dtype == "float32"}

    return Timings(long_layers, layers, rows, threads, title, more)


LONG_SEQUENCES: Suite = (
    _layers(_LAYERS, _LAYER_ROWS, threads=1, compiled=2**14),
    _layers(_LAYERS[:6], _LAYER_ROWS, threads=2),
    _layers((RecurrentLayer("GRU", 1, 4096, 8), _LAYERS[0], _LAYERS[8]), _PARALLEL, threads=1),
    Timings(courses, (replace(TINYSHAKESPEARE_LONG, steps=40),), _ROWS, threads=1),
    Timings(courses, (replace(TINYSHAKESPEARE_LONG, steps=40),), (BACKPROP, SHOOTING), threads=2),
    Timings(courses, (ADDING_LONG, PARITY_LONG), _EXACT[1:], threads=1),
    Timings(courses, tuple(replace(task, steps=100) for task in (MNIST_PIXELS, CIFAR10_PIXELS)), _EXACT, threads=1),
    _TEXT,
    TimeToTarget(_TEXT, 9.0),
    # Enough images to show that the curves are equal; training to the final accuracy takes hours on a CPU.
    Comparison(MNIST_PIXELS, (BACKPROP, SHOOTING)),
)

_EVALUATED = tuple(
    RecurrentLayer("GRU", *size)
    for size in (
        (1, 1024, 64),
        (1, 4096, 64),
        (1, 16384, 64),
        (1, 65536, 64),
        (4, 1024, 64),
        (8, 4096, 64),
        (1, 16384, 128),
        (1, 4096, 256),
        (32, 100, 128),
    )
)
_EVALUATED += (RecurrentLayer("RNN", 1, 4096, 64), RecurrentLayer("LSTM", 1, 4096, 64))

EVALUATION: Suite = (
    Timings(evaluated_layers, _EVALUATED, (SHOOTING,), 1, "recurrent layers, evaluation, one thread"),
    Timings(evaluated_layers, _EVALUATED, (SHOOTING,), 2, "recurrent layers, evaluation, two threads"),
    Timings(evaluated_program, (Program(8000, 96),), (SHOOTING,), 1),
)

_SEPARATE_UNITS = (
    *(RecurrentLayer("ParaGRU", *size) for size in ((1, 1024, 64), (1, 4096, 64), (8, 1024, 64), (32, 512, 64))),
    *(RecurrentLayer("ParaGRU", *size) for size in ((128, 256, 64), (1, 2048, 256))),
    *(RecurrentLayer("ParaLSTM", *size) for size in ((1, 4096, 64), (8, 1024, 64), (32, 512, 64))),
)
SEPARATE_UNITS: Suite = (_layers(_SEPARATE_UNITS, (_LAYER_ROWS[0], SHOOTING, _NEWTON)),)

_PRECISION = (
    *(
        RecurrentLayer(cell, *size, dtype="bfloat16")
        for cell in ("GRU", "RNN", "LSTM")
        for size in ((8, 200, 128), (8, 1000, 128), (2, 4096, 64))
    ),
    RecurrentLayer("GRU", 8, 1000, 128, dtype="float16"),
)
PRECISION: Suite = (Timings(layer_precision, _PRECISION, _EXACT[1:], 1),)

_GPU_TARGETS = (
    RecurrentLayer("GRU", 32, 1024, 256),
    RecurrentLayer("GRU", 8, 4096, 256),
    *(RecurrentLayer("GRU", 1, 2**14, units) for units in (64, 128, 256, 512)),
    RecurrentLayer("GRU", 1, 2**17, 128),
    RecurrentLayer("LSTM", 16, 1024, 768, dtype="float16"),
)
# With 129 to 192 units, a larger batch slows cuDNN's own forward pass.
_GPU_GRID = tuple(RecurrentLayer("GRU", batch, 4096, units) for units, batch in product((64, 160, 256), (1, 8, 64)))
_GPU_GRID += (RecurrentLayer("GRU", 64, 1024, 1024), RecurrentLayer("GRU", 8, 4096, 256, dtype="bfloat16"))
_CUT = tuple(Row(f"shooting C={count}", "shooting", {"segments": count}) for count in (32, 128))

GPU_TIME: Suite = (
    # A small layer first, so that a failure on the device shows within seconds.
    _layers((RecurrentLayer("GRU", 1, 1024, 64),), (_LAYER_ROWS[0], SHOOTING, *_CUT)),
    _layers(_GPU_TARGETS, (_LAYER_ROWS[0], SHOOTING, *_CUT), compiled=1024),
    # Automatic segments beside fixed ones.
    _layers(_GPU_GRID, (SHOOTING, *_CUT), threads=1),
    _layers((RecurrentLayer("GRU", 1, 4096, 256), _LAYERS[6]), (*_LAYER_ROWS, _NEWTON), threads=1),
)
