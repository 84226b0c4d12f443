"""How well a model trains with an engine, and how close its gradients are to backpropagation's on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import isfinite, nan
from typing import Any, ClassVar

from torch import nn

from gradfree import Engine, Fidelity
from gradfree.benchmarks.data.bundled import Data
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.speed import Trainee
from gradfree.fidelity import loss_fidelity

_PROBES = 5
_LOSSES = 20


@dataclass(frozen=True, kw_only=True)
class Training(Case):
    """One training run of one row from one seed."""

    kind: ClassVar[str] = "training"
    alone: ClassVar[bool] = False
    scored: ClassVar[tuple[str, ...]] = ("validation", "test")
    task: Task
    row: Row

    @property
    def subject(self) -> str:
        """The row's label."""
        return self.row.label

    def run(self) -> dict[str, Any]:
        """Train; return the loss now and then, the gradients' fidelity, and the scores at the end."""
        task, engine = self.task, self.row.create_engine()
        data = Data(*(task.on(self.device, split) for split in task.data()))
        model = task.create_model(self.seed).to(self.device)
        optimizer, schedule = task.create_optimizer(model)
        about = {"sizes": sizes(model, data), "defaults": defaults(engine, self.row.options)}
        losses, fidelity, curve, watch = [], [], [], self.row.watch()
        # From the first step to the last: engines keep running means, feedback and the count of steps.
        with task.attach(engine, model) as handle:
            if watch:
                watch.start(handle)
            for step, batch in enumerate(task.batches(data.train, self.seed)):
                optimizer.zero_grad()
                loss = task.loss(model(batch.inputs), batch.targets)
                if step in _spread(_PROBES, task.steps):
                    fidelity.append({"step": step, **self.probed(loss_fidelity(loss, model, handle))})
                loss.backward()
                optimizer.step()
                schedule.step()
                if watch:
                    watch.after_step()
                if step in _spread(_LOSSES, task.steps):
                    losses.append({"step": step, "loss": loss.item(), **self.watched(model)})
                if step in _spread(task.evaluations, task.steps):
                    curve.append({"step": step, "validation": task.score.of(model, data.validation)})
        scores = {name: task.score.of(model, getattr(data, name)) for name in self.scored}
        seen = {"looks": watch.cosines, "risen": watch.risen, "exact": watch.exact} if watch else {}
        return {"losses": losses, "fidelity": fidelity, **scores, **about, **seen} | ({"curve": curve} if curve else {})

    def probed(self, fidelity: Fidelity) -> dict[str, Any]:
        """Return what to keep of the gradients' fidelity at one step."""
        return {"cosine": fidelity.total.cosine, "relative_error": fidelity.total.relative_error}

    def watched(self, model: nn.Module) -> dict[str, Any]:
        """Return what to keep besides the loss now and then."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Trial(Training):
    """A training run that tries a learning rate: judged on validation data, from a seed that is no reported run's."""

    kind: ClassVar[str] = "trial"
    scored: ClassVar[tuple[str, ...]] = ("validation",)
    seed: int = -1

    @property
    def subject(self) -> str:
        """The row's label and the learning rate."""
        return f"{self.row.label} at {self.task.learning_rate:g}"


@dataclass(frozen=True, kw_only=True)
class TimedTraining(Training):
    """A training run of as many steps as fit into the task's seconds; evaluations and the like do not count."""

    kind: ClassVar[str] = "timed training"
    # Others beside it would take part of its time.
    alone: ClassVar[bool] = True

    def run(self) -> dict[str, Any]:
        """Time a step, then train; return what other training runs do, and how many steps it came to."""
        trainee = Trainee.of(self.task, self.row, self.device, self.seed)
        steps = max(1, int((self.task.seconds or 0.0) / trainee.step_time()))
        planned = replace(self, task=replace(self.task, steps=steps))
        return {"steps": steps, **super(TimedTraining, planned).run()}


@dataclass(frozen=True, kw_only=True)
class TimedTrial(Trial, TimedTraining):
    """A training run of so many seconds that tries a learning rate."""

    kind: ClassVar[str] = "timed trial"


def score_in(results: Mapping[str, Any], name: str) -> float:
    """Return the score of a run by its results; NaN if the loss was no finite number in the end."""
    # There are records of accuracies that were taken of NaN.
    losses = results.get("losses")
    return nan if losses and not isfinite(losses[-1]["loss"]) else results.get(name, nan)


def sizes(model: nn.Module, data: Data) -> dict[str, int]:
    """Return what to record of a run's sizes."""
    counts = {split: len(getattr(data, split).inputs) for split in Data._fields}
    return {"parameters": sum(p.numel() for p in model.parameters()), **counts}


def defaults(engine: Engine, given: Mapping[str, Any]) -> str:
    """Return the options that an engine has of itself, none of those that are ``given`` or off."""
    options = {f.name: getattr(engine, f.name) for f in fields(engine)} if is_dataclass(engine) else {}
    own = {
        name: value for name, value in options.items() if name not in given and value is not None and value is not False
    }
    return ", ".join(f"{name}={value}" for name, value in own.items())


def _spread(count: int, steps: int) -> set[int]:
    """Return ``count`` steps from the first to the last, evenly spaced; all if there are fewer."""
    if count < 2:
        return {steps - 1} if count else set()
    return {round(i * (steps - 1) / (count - 1)) for i in range(count)}
