"""The map of depth: engines' share of backpropagation's time over a net's depth, width and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from math import log
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradfree import create_engine, create_model
from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.data.synthetic import random_examples
from gradfree.benchmarks.records.case import ADDED, Case, Row
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.facts import Estimate, Fact, estimates, fact
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import cross_entropy
from gradfree.benchmarks.timing.side_by_side import MEMORY, Errors, Timing, Timings, Turns, times

PLAIN, COMPILED, BY_BLOCK, GRAPHED = "backprop", "compiled backprop", "compiled block by block", "graphed backprop"
_WARM_UP = 3

Loss = Callable[[Tensor, Tensor], Tensor]
_COSINE = "cosine with the exact gradient"
_SHARE = times(PLAIN)
_BESIDE = COMPILED, BY_BLOCK, GRAPHED
"""What backpropagation is, where it is not plain."""


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

    def examples(self) -> Split:
        """Return random inputs and targets."""
        return random_examples((self.batch, *self.example), self.classes, self.tokens)


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
    weighed: ClassVar[bool] = True

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
                COMPILED: partial(self._passes, compiled=lambda model: [model]),
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


def _blocks(model: nn.Module) -> list[nn.Module]:
    chains = create_engine("fixed_point").validate(model).chains
    return [block for chain in chains.values() for block in chain.blocks.values()]


@dataclass(frozen=True)
class DepthMap(Timings[DeepNet]):
    """Engines on deep nets.

    Attributes:
        title: what the nets are, for people.
        compiled_up_to: the most blocks of nets that are compiled, too.
    """

    metric: ClassVar[str] = "time of forward and backward"
    title: str = "deep nets"
    compiled_up_to: int = 0

    def case(self, net: DeepNet, /, **where: Any) -> DeepStep:
        """Return the case that times a net."""
        return DeepStep(net=net, compiled=net.depth <= self.compiled_up_to, **where)

    def where(self, case: Case) -> dict[str, Any]:
        """Return the net, and its depth."""
        return {"setting": case.topic, "at": float(case.about.depth)}

    def cost(self, cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
        """Yield what a row takes, and how close its gradients are."""
        yield from super().cost(cost, results)
        if "cosine" in cost:
            yield fact(_COSINE, "1", cost["cosine"])

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of shares, a row a net, and for each engine the chart of its shares."""
        labels = [label for label in (*_BESIDE, *self._engines) if label in set(facts["row"])]
        figures = Figure(self.metric, "{value:.2f}", _SHARE), Figure(MEMORY, "{value:.1f}", _SHARE)
        settings = list(dict.fromkeys(facts["setting"]))
        ratios = {net: estimates(facts, metric=self.metric, unit=_SHARE, setting=net) for net in settings}
        spreads = {f"{label} on {net}": ratio for net, own in ratios.items() for label, ratio in own.items()}
        return Section(
            title=f"{self.title}, device: {facts['device'][0]}, threads: {self.threads}",
            facts=facts,
            names={"net": "setting"},
            columns=[
                column("backprop (ms)", self.metric, "{value:.1f}", "s", factor=1e3, row=PLAIN),
                *(Column(label, figures, {"row": label}) for label in labels),
            ],
            legend="Forward and backward pass, zeroed gradients to accumulated ones; time as a multiple of plain eager "
            "backpropagation's, median of interleaved rounds, and in brackets peak memory as a multiple of its. "
            "Below 1 an engine pays.",
            verdicts=[self._verdict(ratios[net]) for net in settings],
            remarks=[*self._borders(facts), *self._cosines(facts), verdict.steadiness(spreads), *self.failures(facts)],
            charts=[self._chart(facts, label) for label in labels],
        )

    @property
    def _engines(self) -> list[str]:
        return [row.label for row in self.rows]

    def _verdict(self, ratios: Mapping[str, Estimate]) -> str:
        quicker = [label for label in self._engines if label in ratios and ratios[label].high < 1]
        if not quicker:
            return "no engine pays"
        said = f"pays: {', '.join(f'{label} ({ratios[label].value:.2f})' for label in quicker)}"
        for other in (label for label in _BESIDE if label in ratios):
            ahead = [label for label in quicker if ratios[label].high < ratios[other].low]
            said += f"; beside {other} ({ratios[other].value:.2f}) {', '.join(ahead) if ahead else 'none'}"
        return said

    def _borders(self, facts: pl.DataFrame) -> Iterator[str]:
        """Yield from how many blocks on each engine pays, in nets that differ in nothing else."""
        for label in self._engines:
            own = estimates(facts, "setting", metric=self.metric, unit=_SHARE, row=label)
            found = []
            for family, nets in _families(self.subjects).items():
                known = [(net.depth, own[str(net)].value) for net in nets if str(net) in own]
                crossed = border(known)
                if crossed is not None:
                    found.append(f"{crossed:.0f} ({family})")
            words = f"from {', '.join(found)} blocks on" if found else "nowhere"
            yield f"{label} takes less time than eager backprop {words}."

    def _cosines(self, facts: pl.DataFrame) -> Iterator[str]:
        for label in self._engines:
            found = [cosine.value for cosine in estimates(facts, "setting", metric=_COSINE, row=label).values()]
            if found:
                yield f"Cosine of {label}'s gradients with exact ones, untrained: {min(found):.3f} to {max(found):.3f}."

    def _chart(self, facts: pl.DataFrame, label: str) -> Chart:
        """Return the chart of a row's share by depth, a line for nets that differ in nothing else."""
        families = {str(net): family for family, nets in _families(self.subjects).items() for net in nets}
        own = facts.filter(pl.col("row") == label).with_columns(
            series=pl.col("setting").replace_strict(families, return_dtype=pl.String)
        )
        return Chart(
            f"{self.title}, {facts['device'][0]}, threads: {self.threads}: {label}",
            points(own, "at", Figure(self.metric, unit=_SHARE)),
            Axis("blocks (count)", "counts"),
            Axis("time, as a multiple of eager backprop's (×)", "log"),
            True,
            rules={"the border": 1.0},
        )


def border(shares: Sequence[tuple[int, float]]) -> float | None:
    """Return from how many blocks on the share of backpropagation's time stays below 1, by powers between depths.

    Args:
        shares: depths, ascending, with the shares there.
    """
    below = list(takewhile(lambda point: point[1] < 1, reversed(shares)))
    if not below:
        return None
    depth, share = below[-1]
    if len(below) == len(shares):
        return float(depth)
    before, above = shares[-len(below) - 1]
    return float(before * (depth / before) ** (log(above) / log(above / share)))


def _families(nets: Sequence[DeepNet]) -> dict[str, list[DeepNet]]:
    """Return nets that differ in depth alone, by what they are."""
    found: dict[str, list[DeepNet]] = {}
    for net in sorted(nets, key=lambda net: net.depth):
        found.setdefault(f"{net.family}, batch {net.batch}", []).append(net)
    return found
