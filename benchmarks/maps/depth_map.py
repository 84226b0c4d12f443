"""The depth map: engines' time relative to autograd's over a net's depth, width and batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradfree import create_model
from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.data.synthetic import random_examples
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.tasks.task import cross_entropy
from gradfree.benchmarks.timing.side_by_side import PASSES
from gradfree.benchmarks.timing.timed import Timing, timed

PLAIN, COMPILED, GRAPHED = "backprop", "compiled backprop", "graphed backprop"
"""Labels in records."""
DISPLAY_NAMES = {PLAIN: "autograd", COMPILED: "compiled autograd", GRAPHED: "graphed autograd"}
_WARM_UP = 3
_COSINE = "cosine with the exact gradient"
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DeepNet:
    """A model with a batch of random examples.

    Attributes:
        family: description without the depth, shown in reports.
        depth: number of blocks.
        model: name of a registered model.
        options: options of the model.
        batch: number of examples.
        example: shape of an example.
        classes: number of classes of the targets, one target an example or a token; also the size of the vocabulary.
        tokens: whether examples are token sequences.
    """

    family: str
    depth: int
    model: str
    options: Mapping[str, Any]
    batch: int
    example: tuple[int, ...]
    classes: int = 10
    tokens: bool = False

    def __str__(self) -> str:
        return f"{self.depth} blocks, {self.family}, batch {self.batch}"

    def create(self) -> nn.Module:
        """Return the model."""
        return create_model(self.model, **self.options)

    def examples(self) -> Split:
        """Return random inputs and targets."""
        return random_examples((self.batch, *self.example), self.classes, self.tokens)


class Passes:
    """A forward and backward pass of a model on one batch.

    Args:
        model: the model, on its device.
        batch: the batch, on the same device.
        loss: called with the model's output and the targets.
        row: the engine to attach; autograd if not given.
        compiled: whether the model is compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Split,
        loss: Loss = cross_entropy,
        row: Row | None = None,
        compiled: bool = False,
    ):
        self.model, self.batch, self.loss, self.parameters = model, batch, loss, list(model.parameters())
        if row is not None:
            row.create_engine().attach(model)
        if compiled:
            model.compile()

    def __call__(self) -> None:
        """Run both passes."""
        for parameter in self.parameters:
            parameter.grad = None
        self.loss(self.model(self.batch.inputs), self.batch.targets).backward()

    def gradient(self) -> Tensor:
        """Return the gradient of all parameters as one vector."""
        self()
        return torch.cat([p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in self.parameters])


class Graphed:
    """The passes as one CUDA graph."""

    def __init__(self, passes: Passes):
        self._passes = passes
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._passes()
        current.wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._passes()

    def __call__(self) -> None:
        """Run both passes."""
        self._graph.replay()


def cosine_of(case: Timing, step: Any, turns: Sequence[float]) -> dict[str, Any]:
    """Return the cosine of a row's gradient with the exact one."""
    if not isinstance(step, Passes):
        return {}
    exact = case.timed.steps(case)[PLAIN]().gradient()
    return {"cosine": torch.cosine_similarity(step.gradient(), exact, 0).item()}


def _facts_of(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the cosine of a row's gradient with the exact one."""
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
    display_names=DISPLAY_NAMES,
    place=lambda net: {"setting": str(net), "at": float(net.depth)},
    costs=cosine_of,
    facts=_facts_of,
)
def deep_steps(case: Timing) -> Mapping[str, Callable[[], Any]]:
    """Return, by label, functions that build the passes: autograd, compiled if asked for, graphed, and each engine."""
    others: dict[str, Callable[[], Any]] = {}
    if case.more["compiled"]:
        others[COMPILED] = partial(_passes, case, compiled=True)
    if torch.device(case.device).type == "cuda":
        others[GRAPHED] = lambda: Graphed(_passes(case))
    rows = {row.label: partial(_passes, case, row) for row in case.rows}
    return {PLAIN: partial(_passes, case), **others, **rows}


def _passes(case: Timing, row: Row | None = None, compiled: bool = False) -> Passes:
    torch.manual_seed(case.seed)
    net: DeepNet = case.item
    model = net.create().to(case.device)
    batch = Split(*(examples.to(case.device) for examples in net.examples()))
    return Passes(model, batch, row=row, compiled=compiled)


def compiled_up_to(blocks: int) -> Callable[[DeepNet], dict[str, bool]]:
    """Return the setting that compiles nets of up to ``blocks`` blocks: compiling takes long."""
    return lambda net: {"compiled": net.depth <= blocks}
