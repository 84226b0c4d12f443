"""The depth map: engines' time relative to autograd's over a net's depth, width and batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradfree import create_model
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


class Passes:
    """A forward and backward pass of a net on one batch: by autograd, or with the row's engine."""

    def __init__(self, case: Timing, row: Row | None = None, compiled: bool = False):
        torch.manual_seed(case.seed)
        net: DeepNet = case.item
        self.model = create_model(net.model, **net.options).to(case.device)
        examples = random_examples((net.batch, *net.example), net.classes, net.tokens)
        self.inputs, self.targets = (tensor.to(case.device) for tensor in examples)
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
        others[COMPILED] = partial(Passes, case, compiled=True)
    if torch.device(case.device).type == "cuda":
        others[GRAPHED] = lambda: Graphed(Passes(case))
    rows = {row.label: partial(Passes, case, row) for row in case.rows}
    return {PLAIN: partial(Passes, case), **others, **rows}


def compiled_up_to(blocks: int) -> Callable[[DeepNet], dict[str, bool]]:
    """Return the setting that compiles nets of up to ``blocks`` blocks: compiling takes long."""
    return lambda net: {"compiled": net.depth <= blocks}
