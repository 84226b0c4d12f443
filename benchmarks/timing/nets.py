"""Cost of a step of a whole model on random examples: deep nets, recurrent nets and orthogonal ones.

Of deep nets the two passes are timed, of the others a training step, with its memory beside torch's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from gradfree import create_model
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.chart import Axis
from gradfree.benchmarks.tables.column import Figure, column
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.tasks.task import cross_entropy
from gradfree.benchmarks.timing.recurrent_layers import COMPILED, CellLoop, replace_layers
from gradfree.benchmarks.timing.side_by_side import MEMORY, PASSES, PROCESS, RATIO, STEP, Trainee, mean_seconds, times
from gradfree.benchmarks.timing.timed import Timing, timed

PLAIN, COMPILED_PLAIN, GRAPHED = "backprop", "compiled backprop", "graphed backprop"
"""Labels in records of deep nets."""
_DISPLAY_NAMES = {PLAIN: "autograd", COMPILED_PLAIN: "compiled autograd", GRAPHED: "graphed autograd"}
FUSED, LOOP = "fused layer", "Python loop"
_CLASSES, _WARM_UP = 10, 3
_COSINE, _SPEED = "cosine with the exact gradient", "speed"

_LEARNING_RATE = 0.1
"""Of an ``orthogonal_mlp``, large enough to train: weights drift and are retracted as in a real training run."""
_LAYERS = 200
"""A turn takes as many steps as run this many layers in total, at least one."""
EACH, SEGMENTS = "each block", "√L segments"


@dataclass(frozen=True)
class Net:
    """A model with a batch of random examples.

    Attributes:
        model: name of a registered model.
        options: options of the model.
        batch: number of examples.
        example: shape of an example: (T,) tokens, or an image (C, H, W).
        classes: number of classes of the targets, one target an example or a token; also the size of a vocabulary.
    """

    model: str
    options: Mapping[str, Any]
    batch: int
    example: tuple[int, ...]
    classes: int

    def build(self, seed: int, device: str, tokens: bool = False) -> tuple[nn.Module, Tensor, Tensor]:
        """Return the model, inputs and targets; ``tokens``: examples are token sequences."""
        torch.manual_seed(seed)
        model = create_model(self.model, **self.options).to(device)
        shape = (self.batch, *self.example)
        inputs = torch.randint(self.classes, shape) if tokens else torch.randn(shape)
        targets = torch.randint(self.classes, shape if tokens else shape[:1])
        return model, inputs.to(device), targets.to(device)


@dataclass(frozen=True)
class DeepNet(Net):
    """A net with many blocks.

    Attributes:
        family: description without the depth, shown in reports.
        depth: number of blocks.
        tokens: whether examples are token sequences.
    """

    family: str
    depth: int
    tokens: bool = False

    def __str__(self) -> str:
        return f"{self.depth} blocks, {self.family}, batch {self.batch}"


class Passes:
    """A forward and backward pass of a net on one batch: by autograd, or with the row's engine."""

    def __init__(self, case: Timing, row: Row | None = None, compiled: bool = False):
        self.model, self.inputs, self.targets = case.item.build(case.seed, case.device, case.item.tokens)
        self.parameters = list(self.model.parameters())
        if row is not None:
            row.create_engine().attach(self.model)
        if compiled:
            self.model.compile()

    def __call__(self) -> None:
        """Run both passes."""
        for parameter in self.parameters:
            parameter.grad = None
        cross_entropy(self.model(self.inputs), self.targets).backward()

    def gradient(self) -> Tensor:
        """Return the gradient of all parameters as one vector."""
        self()
        return torch.cat([p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in self.parameters])


def _graphed(passes: Passes) -> Callable[[], Passes]:
    """Return a function that runs the passes as one CUDA graph, and keeps the tensors on which the graph works."""
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            passes()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passes()

    def replay() -> Passes:
        graph.replay()
        return passes

    return replay


def _cosine_of(case: Timing, step: Any, turns: Sequence[float]) -> dict[str, Any]:
    """Return the cosine of a row's gradient with the exact one."""
    if not isinstance(step, Passes):
        return {}
    exact = case.timed.steps(case)[PLAIN]().gradient()
    return {"cosine": torch.cosine_similarity(step.gradient(), exact, 0).item()}


def _cosine_fact(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    if "cosine" in cost:
        yield fact(_COSINE, "1", cost["cosine"])


@timed(
    kind="deep step",
    subject="net",
    metric=PASSES,
    rounds=7,
    with_memory=True,
    title="deep nets",
    legend="Forward and backward pass, from zeroed to accumulated gradients, as a multiple of eager autograd's; in "
    "brackets, peak memory likewise. Below 1 an engine is better.",
    names={"net": "setting"},
    across="row",
    display_names=_DISPLAY_NAMES,
    place=lambda net: {"setting": str(net), "at": float(net.depth)},
    costs=_cosine_of,
    facts=_cosine_fact,
)
def deep_steps(case: Timing) -> Mapping[str, Callable[[], Any]]:
    """Return, by label, functions that build the passes: autograd, compiled if asked for, graphed, and each engine."""
    others: dict[str, Callable[[], Any]] = {}
    if case.more.get("compiled"):
        others[COMPILED_PLAIN] = partial(Passes, case, compiled=True)
    if torch.device(case.device).type == "cuda":
        others[GRAPHED] = lambda: _graphed(Passes(case))
    rows = {row.label: partial(Passes, case, row) for row in case.rows}
    return {PLAIN: partial(Passes, case), **others, **rows}


@dataclass(frozen=True)
class RecurrentNet(Net):
    """A recurrent model; examples of one dimension are tokens.

    Attributes:
        label: shown in reports.
    """

    label: str

    def __str__(self) -> str:
        return self.label


def _speedup(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the row's speedup over the Python loop."""
    for loop in results["rows"]:
        if loop["label"] == LOOP and "time" in cost:
            yield fact(_SPEED, times(LOOP), loop["time"] / cost["time"])


@timed(
    kind="recurrent step",
    subject="net",
    runs=1,
    title="training steps of recurrent models",
    legend=f"A training step with Adam; × faster: than the {LOOP} over torch's cell. {FUSED}: torch's module, with a "
    f"kernel of cuDNN or oneDNN if there is one; {COMPILED}: the loop over a cell compiled by torch.compile.",
    names={"row": "row"},
    columns=[
        column("(ms)", STEP, "{value:.1f}", "s", factor=1e3),
        column("(× faster)", _SPEED, unit=times(LOOP)),
    ],
    across="setting",
    facts=_speedup,
)
def recurrent_steps(case: Timing) -> Mapping[str, Callable[[], Trainee]]:
    """Return, by label, functions that build the model in training: fused layers, loops over cells, each engine."""
    loops = {LOOP: partial(_trainee, case, loop=CellLoop)}
    loops[COMPILED] = partial(_trainee, case, loop=partial(CellLoop, compiled=True))
    engines = {row.label: partial(_trainee, case, row) for row in case.rows}
    return {FUSED: partial(_trainee, case), **loops, **engines}


def _trainee(case: Timing, row: Row | None = None, loop: Callable[[nn.RNNBase], nn.Module] | None = None) -> Trainee:
    model, inputs, targets = case.item.build(case.seed, case.device, len(case.item.example) == 1)
    if loop is not None:
        replace_layers(model, loop)
    if row is not None:
        row.create_engine().attach(model)
    return Trainee(model, torch.optim.Adam(model.parameters()), cross_entropy, inputs, targets)


@dataclass(frozen=True)
class Network:
    """An ``orthogonal_mlp`` whose inputs are as wide as its hidden layers, with a batch of random examples."""

    depth: int
    width: int
    batch: int

    def __str__(self) -> str:
        return f"{self.depth} layers of {self.width}, batch {self.batch}"


def build_trainee(network: Network, row: Row | None, device: str, seed: int) -> Trainee:
    """Return a network in training, with the row's engine attached if there is a row."""
    width = network.width
    options = {"in_features": width, "num_classes": _CLASSES, "depth": network.depth, "width": width}
    net = Net("orthogonal_mlp", options, network.batch, (width,), _CLASSES)
    model, inputs, targets = net.build(seed, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    if row is not None:
        row.create_engine().attach(model)
    return Trainee(model, optimizer, cross_entropy, inputs, targets)


@timed(
    kind="step",
    subject="network",
    # A multiple of every row's ``orthogonalize_every``.
    runs=16,
    title="cost of a step of an orthogonal_mlp",
    legend="One step with SGD. All rows share a process: hooks of engines that keep weights orthogonal take time in "
    "the steps of other rows, too.",
)
def step_costs(case: Timing) -> Mapping[str, Callable[[], Trainee]]:
    """Return, by row, a function that builds the network in training with the row's engine."""
    return {row.label: partial(build_trainee, case.item, row, case.device, case.seed) for row in case.rows}


@dataclass(frozen=True)
class Checkpointed(Row):
    """An engine on a network with torch's checkpoints, which store some layers' inputs and recompute the others.

    Attributes:
        kept: what is checkpointed: "each block", a layer with its activation function, or "√L segments" of blocks.
    """

    kept: str


class _Steps:
    """Several steps; a call returns their mean seconds, on a CPU of processor time, which excludes other processes."""

    def __init__(self, case: Timing, row: Row):
        network: Network = case.item
        self.trainee, self.device = build_trainee(network, row, case.device, case.seed), case.device
        self.peak_memory = self.trainee.peak_memory
        self.runs = max(1, _LAYERS // network.depth)
        if isinstance(row, Checkpointed):
            layers: Any = self.trainee.model.layers
            blocks = [layers[i : i + 2] for i in range(0, len(layers), 2)]
            segments = len(blocks) if row.kept == EACH else isqrt(network.depth)
            run = partial(checkpoint_sequential, blocks, segments, use_reentrant=False)
            object.__setattr__(layers, "forward", lambda x: run(input=x))

    def __call__(self) -> float:
        """Take the steps."""
        if self.device != "cpu":
            return mean_seconds(self.trainee, self.runs)
        start = process_time()
        for _ in range(self.runs):
            self.trainee()
        return (process_time() - start) / self.runs


@timed(
    kind="memory step",
    subject="network",
    rounds=3,
    runs=1,
    with_memory=True,
    title="time against memory of a step of an orthogonal_mlp",
    legend="One step with SGD by number of hidden layers, in processor time. MiB: peak memory of the step, with "
    "gradients, without weights. Checkpoints: torch.utils.checkpoint, not reentrant, of each layer with its activation "
    "function, or of √L segments of such blocks, the last of which is stored.",
    columns=[
        column("layers: step (×)", STEP, unit=RATIO),
        column("layers: MiB", MEMORY, "{value:.1f}", "MiB"),
        column("layers: process MiB", PROCESS, "{value:.0f}"),
    ],
    across="at",
    place=lambda network: {"setting": str(network), "at": float(network.depth)},
    against=(Figure(MEMORY, unit="MiB"), Axis("peak memory of a step (MiB)", "log")),
)
def memory_steps(case: Timing) -> Mapping[str, Callable[[], _Steps]]:
    """Return, by row, a function that builds the network in training."""
    return {row.label: partial(_Steps, case, row) for row in case.rows}
