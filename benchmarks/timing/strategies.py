"""What a step of Lightning's Trainer costs with an engine as its strategy, and without."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_module  # type: ignore[attr-defined]
from matplotlib.axes import Axes
from torch import Tensor
from torch.utils.data import DataLoader

from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.drawing import Styles
from gradfree.benchmarks.tables.estimates import Spread
from gradfree.benchmarks.tables.experiment import Part, matching
from gradfree.benchmarks.tables.section import Fact, Plots, Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.speed import Timing, Turn, now
from gradfree.lightning import EngineStrategy

_AUTO = "auto"
_WARM_UP = 5
_STEPS = 20
_MARGIN = 0.03


@dataclass(frozen=True, kw_only=True)
class StrategyTiming(Timing[Callable[[], float]]):
    """Time of a step under ``Trainer(strategy="auto")`` and with each row's engine: one short fit a turn."""

    kind: ClassVar[str] = "strategy"
    rounds: ClassVar[int] = 15
    task: Task
    sides = "all strategies"

    @property
    def topic(self) -> str:
        """The task."""
        return self.task.name

    def steps(self) -> Mapping[str, Callable[[], Callable[[], float]]]:
        """Return what builds a module that is fitted with each strategy, a new one every time."""
        strategies: dict[str, Callable[[], Any]] = {_AUTO: lambda: _AUTO}
        strategies |= {row.label: lambda row=row: EngineStrategy(row.create_engine()) for row in self.rows}
        return {label: partial(self._fit, strategy) for label, strategy in strategies.items()}

    def turn(self, step: Callable[[], float]) -> Turn:
        """Fit once; return the mean of the steps behind the warm-up."""
        return (step(),)

    @cached_property
    def _batches(self) -> list[Split]:
        train = Split(*(x.to(self.device) for x in self.task.data().train))
        return list(islice(self.task.batches(train, self.seed), _WARM_UP + _STEPS))

    def _fit(self, strategy: Callable[[], Any]) -> Callable[[], float]:
        """Return what fits the task's model for some steps, and returns the mean time of one."""
        module = _Module(self.task, self.seed)
        return lambda: _step_time(module, strategy(), self._batches, self.device)


def _step_time(module: pl.LightningModule, strategy: Any, batches: Sequence[Split], device: str) -> float:
    """Return the mean time of a step."""
    clock = _Clock()
    with _quiet():
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="gpu" if device == "cuda" else device,
            devices=1,
            max_epochs=1,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return (clock.end - clock.start) / _STEPS


class _Module(pl.LightningModule):
    """A task for the Trainer."""

    def __init__(self, task: Task, seed: int):
        super().__init__()
        self.task, self.model = task, task.create_model(seed)

    def training_step(self, batch: Split, index: int) -> Tensor:
        return self.task.loss(self.model(batch.inputs), batch.targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer, _ = self.task.create_optimizer(self.model)
        return optimizer


class _Clock(pl.Callback):
    """Notes when the first step behind the warm-up begins, and when the last one has ended."""

    start = end = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        if index == _WARM_UP:
            self.start = now(pl_module.device)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.end = now(pl_module.device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning from saying at every fit what devices and workers it might have."""
    log = rank_zero_module.log
    level = log.level
    log.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    log.setLevel(level)


@dataclass(frozen=True)
class StrategyTimings(Part):
    """Engines as strategies, on one task.

    Attributes:
        task: what is trained.
        rows: the engines.
    """

    task: Task
    rows: tuple[Row, ...]

    def timing(self, device: str) -> Iterator[Case]:
        """Yield the case that times all strategies."""
        yield StrategyTiming(task=self.task, rows=self.rows, device=device, seed=0)

    def section(self, records: Mapping[str, Record], device: str) -> Section | None:
        """Return the figures of ``device``, if there are any."""
        found = [record for case in self.timing(device) for record in matching(records, case)]
        return StrategySection(self.task, found[0]["results"]["rows"], device) if found else None


@dataclass(frozen=True)
class StrategySection(Section):
    """Times of a step, a row a strategy."""

    task: Task
    results: Sequence[dict[str, Any]]
    device: str

    legend = (
        f"One step of Lightning's Trainer, from batch to batch; medians of {StrategyTiming.rounds} interleaved fits of "
        f'{_STEPS} steps, and in brackets quartiles. ×: as a multiple of strategy="auto", Lightning\'s own, in the '
        "same round."
    )

    @property
    def title(self) -> str:
        """Say what was compared."""
        return f"Trainer(strategy=...): {self.task.name}, {self.task.model}, device: {self.device}"

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row a strategy."""
        yield ["strategy", "step (ms)", "step (×)"]
        for row in self.results:
            low, high = row["ratio_quartiles"]
            yield [row["label"], f"{1e3 * row['time']:.2f}", f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]"]

    def remarks(self) -> Iterator[str]:
        """Yield which strategies cost what Lightning's own does."""
        _, *engines = self.results
        near = [row["label"] for row in engines if abs(row["ratio"] - 1) <= _MARGIN]
        if near:
            yield f"Within {100 * _MARGIN:.0f} % of Lightning's own step: {', '.join(near)}."

    def verdicts(self) -> list[str]:
        """Return how each strategy's speed compares to Lightning's own, in words."""
        baseline, *others = self.results
        return ["the baseline", *(verdict.speed(Spread.recorded(row, "ratio"), baseline["label"]) for row in others)]

    def plots(self) -> Plots:
        """Return what draws the medians with their quartiles."""
        return {f"Trainer(strategy=...), {self.task.name}, {self.device}": self._draw_ratios}

    def _draw_ratios(self, axes: Axes, styles: Styles) -> None:
        ratios = [Spread.recorded(row, "ratio") for row in self.results]
        spread = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
        looks = styles([row["label"] for row in self.results])
        colors = [look["color"] for look in looks.values()]
        axes.barh(list(looks), [r.median for r in ratios], xerr=spread, capsize=3, color=colors)
        axes.axvline(1.0, color="0.7", zorder=0)
        axes.invert_yaxis()
        axes.set_xlabel(f'time of a step, as a multiple of "{_AUTO}"\'s (×)')
        axes.set_ylabel("strategy")

    def facts(self) -> Iterator[Fact]:
        """Yield the medians."""
        for row in self.results:
            yield Fact.median(row["label"], "", "step time", f"× {_AUTO}", Spread.recorded(row, "ratio"))
