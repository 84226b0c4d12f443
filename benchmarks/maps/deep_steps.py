"""What forward and backward pass of a deep net cost: plain, compiled, as a CUDA graph, and by engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradfree import create_engine, create_model
from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.records.case import ADDED, Row
from gradfree.benchmarks.tasks.task import cross_entropy
from gradfree.benchmarks.timing.profiles import peak_memory
from gradfree.benchmarks.timing.speed import Errors, Timing, Turn, Turns

PLAIN, COMPILED, BY_BLOCK, GRAPHED = "backprop", "compiled backprop", "compiled block by block", "graphed backprop"
_WARM_UP = 3

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DeepNet:
    """A model with a batch of random examples.

    Attributes:
        family: what nets of other depths have in common with it, for people.
        depth: number of blocks.
        model: name of a registered model.
        options: of the model.
        batch: number of examples.
        example: shape of one; of whole numbers below ``classes``, tokens, if there are ``tokens``.
        classes: of the targets, one an example, or one a token.
        tokens: whether examples are token sequences.
        looped: whether the model calls its ``blocks`` one by one, in a loop over an ``nn.ModuleList``.
    """

    family: str
    depth: int
    model: str
    options: Mapping[str, Any]
    batch: int
    example: tuple[int, ...]
    classes: int = 10
    tokens: bool = False
    looped: bool = field(default=False, metadata=ADDED)

    def __str__(self) -> str:
        return f"{self.depth} blocks{' in a loop' * self.looped}, {self.family}, batch {self.batch}"

    def create(self) -> nn.Module:
        """Return the model."""
        model = create_model(self.model, **self.options)
        if self.looped:
            model.blocks = _Loop(model.get_submodule("blocks").children())
        return model

    def examples(self) -> tuple[Tensor, Tensor]:
        """Return random inputs and targets."""
        shape = (self.batch, *self.example)
        if self.tokens:
            return torch.randint(self.classes, shape), torch.randint(self.classes, shape)
        return torch.randn(shape), torch.randint(self.classes, (self.batch,))


class _Loop(nn.ModuleList):
    """Blocks as many models have them: called one by one."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what they make of ``x``, one after the other."""
        for block in self:
            x = block(x)
        return x


class Passes:
    """Forward and backward pass of a model on one batch.

    Args:
        model: as it is attached to, or compiled.
        batch: on its device.
        loss: of the model's output and the targets.
        row: the engine; without one autograd does it.
        compiled: what of the model is compiled, each by itself.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Split,
        loss: Loss = cross_entropy,
        row: Row | None = None,
        compiled: Iterable[nn.Module] = (),
    ):
        self.model, self.batch, self.loss, self.parameters = model, batch, loss, list(model.parameters())
        if row is not None:
            row.create_engine().attach(model)
        for module in compiled:
            module.compile()

    def __call__(self) -> None:
        """Run both."""
        for parameter in self.parameters:
            parameter.grad = None
        self.loss(self.model(self.batch.inputs), self.batch.targets).backward()

    def gradient(self) -> Tensor:
        """Return the gradient of all parameters as one vector."""
        self()
        return torch.cat([p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in self.parameters])


class Graphed:
    """The same passes as one CUDA graph, which is launched at once."""

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
        """Run both."""
        self._graph.replay()


class PassTiming(Timing[Callable[[], Any]]):
    """Time, peak memory and closeness of the gradients of forward and backward pass; plain autograd's come first."""

    rounds: ClassVar[int] = 7

    def costs(self, step: Callable[[], Any], turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the peak memory in bytes."""
        return {"peak_memory": peak_memory(step, self.device)}

    def results(self, steps: Mapping[str, Any], turns: Turns, errors: Errors) -> dict[str, Any]:
        """Return the costs, and how close each row's gradients are to the exact ones."""
        found = super().results(steps, turns, errors)
        exact = steps[PLAIN].gradient()
        for cost in found["rows"]:
            step = steps.get(cost["label"])
            if isinstance(step, Passes):
                cost["cosine"] = torch.cosine_similarity(step.gradient(), exact, 0).item()
        return found


@dataclass(frozen=True, kw_only=True)
class DeepStep(PassTiming):
    """Passes of a net as it is initialised, on random examples.

    Attributes:
        net: what is run.
        compiled: whether torch.compile's backpropagation is run beside, which takes long to compile.
    """

    kind: ClassVar[str] = "deep step"
    topic_field: ClassVar[str] = "net"
    net: DeepNet
    compiled: bool = False

    def steps(self) -> Mapping[str, Callable[[], Any]]:
        """Return what builds the passes."""
        others: dict[str, Callable[[], Any]] = {}
        if self.compiled:
            others |= {
                COMPILED: partial(self._passes, compiled=_whole),
                BY_BLOCK: partial(self._passes, compiled=_blocks),
            }
        if torch.device(self.device).type == "cuda":
            others[GRAPHED] = lambda: Graphed(self._passes())
        rows = {row.label: partial(self._passes, row) for row in self.rows}
        return {PLAIN: self._passes, **others, **rows}

    def _passes(
        self, row: Row | None = None, compiled: Callable[[nn.Module], Iterable[nn.Module]] | None = None
    ) -> Passes:
        torch.manual_seed(self.seed)
        model = self.net.create().to(self.device)
        batch = Split(*(examples.to(self.device) for examples in self.net.examples()))
        return Passes(model, batch, row=row, compiled=compiled(model) if compiled else ())


def _whole(model: nn.Module) -> list[nn.Module]:
    return [model]


def _blocks(model: nn.Module) -> list[nn.Module]:
    chains = create_engine("fixed_point").validate(model).chains
    return [block for chain in chains.values() for block in chain.blocks.values()]
