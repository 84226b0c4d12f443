"""Searching for the settings that an engine does best with: every trial is a case, and has its record."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from math import inf, isnan
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.running.runner import devices_in, loader_in, make_folder
from gradfree.benchmarks.running.workers import Workers
from gradfree.benchmarks.sweeps.axes import Sweep, command_of
from gradfree.benchmarks.sweeps.study import SharedStudy, joined
from gradfree.benchmarks.sweeps.sweep import suite_of, with_options
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.benchmarks.training.comparison import Trial as TrialRun
from gradfree.benchmarks.training.outcomes import score_in
from gradfree.cli import UsageError
from gradfree.registry import engine_class
from gradfree.wording import no_such

_AXES = {"learning_rate": "learning_rates"} | {
    name: name for name in ("batch_size", "length", "depth", "dtype", "steps")
}
"""The sweep's axis of each setting that is not the engine's."""


@dataclass(frozen=True)
class Space:
    """Settings to be found, and a sweep that has all others.

    Attributes:
        sweep: names one task, model and engine.
        engine: its name.
        fixed: the engine's options that are not searched.
        ranges: what each setting is chosen from.
    """

    sweep: Sweep
    engine: str
    fixed: Mapping[str, Any]
    ranges: dict[str, BaseDistribution]

    @classmethod
    def of(cls, sweep: Sweep, given: Mapping[str, Any]) -> Space:
        """Read ``given``: for each setting ``[low, high]``, ``[low, high, "log"]`` or choices.

        Raises:
            UsageError: unknown or fixed settings, no range, or not one engine.
        """
        engines = with_options(sweep.engines)
        if len(engines) != 1:
            raise UsageError("a search is for one engine: --engines highway_bp, say.")
        ((engine, fixed),) = engines.items()
        try:
            options = inspect.signature(engine_class(engine)).parameters
        except ValueError as error:
            raise UsageError(str(error)) from error
        if not given:
            raise UsageError("say what is to be found: --space '{learning_rate: [1e-4, 1e-1, log]}'.")
        for name in given:
            if name not in _AXES and name not in options:
                raise UsageError(no_such(f"setting of the training or of {engine}", name, [*_AXES, *options]))
            if (axis := _AXES.get(name)) in sweep.named or name in fixed:
                fixing = "--" + (axis or "engines").replace("_", "-")
                raise UsageError(f"{fixing} fixes {name}, which --space searches: leave out one of them.")
        # Whole numbers may be the ends of a range that is not of whole numbers.
        fractional = {"learning_rate"} | {n for n, p in options.items() if "float" in str(p.annotation)}
        ranges = {name: _range(name, values, name in fractional) for name, values in sorted(given.items())}
        return cls(sweep, engine, fixed, ranges)

    def settings(self, sampled: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was sampled, to three digits: nobody wants to read or type more of them."""
        return {name: _rounded(sampled[name], values) for name, values in self.ranges.items()}

    def at(self, settings: Mapping[str, Any]) -> Sweep:
        """Return the sweep with these settings."""
        axes = {_AXES[name]: value for name, value in settings.items() if name in _AXES}
        options = {name: value for name, value in settings.items() if name not in _AXES}
        return replace(self.sweep, engines={self.engine: {**self.fixed, **options}}, **axes)

    def extremes(self) -> Iterator[dict[str, Any]]:
        """Yield settings that have every end of the ranges, and every choice, at least once."""
        ends = {name: _ends(values) for name, values in self.ranges.items()}
        for n in range(max(map(len, ends.values()))):
            yield {name: values[n % len(values)] for name, values in ends.items()}


def _range(name: str, given: Any, fractional: bool) -> BaseDistribution:
    if not isinstance(given, list) or len(given) < 2 or any(isinstance(value, (list, dict)) for value in given):
        raise UsageError(
            f"--space {name}: {given} is no range, [low, high] or [low, high, log], and no list of choices."
        )
    (low, high), log = given[:2], given[2:] == ["log"]
    if (given[2:] and not log) or not {type(low), type(high)} <= {int, float}:
        return CategoricalDistribution(given)
    if not -inf < low < high < inf:
        raise UsageError(f"--space {name}: {given} is no range: the first number must be below the second.")
    try:
        if fractional or isinstance(low, float) or isinstance(high, float):
            return FloatDistribution(low, high, log=log)
        return IntDistribution(low, high, log=log)
    except ValueError as error:
        raise UsageError(f"--space {name}: {error}") from error


def _rounded(value: Any, values: BaseDistribution) -> Any:
    if not isinstance(values, FloatDistribution):
        return value
    return min(max(float(f"{value:.3g}"), values.low), values.high)


def _ends(values: BaseDistribution) -> list[Any]:
    if isinstance(values, CategoricalDistribution):
        return list(values.choices)
    assert isinstance(values, (FloatDistribution, IntDistribution))
    return [values.low, values.high]


def run(
    sweep: Sweep, given: Mapping[str, Any], trials: int, out: Path, seed: int, device: str, data: str | None
) -> None:
    """Add trials to the study in ``out`` until it has as many as are asked for, then say which did best."""
    devices_in(device)
    search = Search(Space.of(sweep, given), device, data, loader_in(data))
    # What cannot be is said before anything runs.
    case, *_ = [search.case(settings) for settings in search.space.extremes()]
    make_folder(out)
    with joined(out, _name(case, given), case.task.score.higher_is_better) as study:
        if known := len(study.counted()):
            print(f"{known} of {trials} trials are in {out} already, or under way.")
        try:
            while trial := study.ask(search.space.ranges, trials, seed):
                search.run(trial, study)
        except KeyboardInterrupt:
            print(f"Interrupted. {out} has what is finished; the same command goes on.", file=sys.stderr)
            raise
        best, counted = study.best(), study.counted()
        settings = search.space.settings(best.params)
        finished = [trial for trial in counted if trial.state.is_finished()]
        if others := len(counted) - len(finished):
            print(f"{others} of {trials} trials are still under way in other processes.")
        print(
            f"\nBest of {len(finished)} trials, {case.task.name}: {_words(case, best.values[0], settings)}.\n"
            "It was chosen for this score. What it is worth, with other seeds, on test data, beside backprop:\n"
            f"{search.command(settings, out)}"
        )


@dataclass(frozen=True)
class Search:
    """Settings that are sought, and where they are tried.

    Attributes:
        space: the settings.
        device: of the trials.
        data: as on the command line.
        loader: returns the data of a model of the user's own.
    """

    space: Space
    device: str
    data: str | None
    loader: str | None

    def run(self, trial: Trial, study: SharedStudy) -> None:
        """Run the trial's case, if it has no record yet, and tell the study."""
        settings = self.space.settings(trial.params)
        try:
            case = self.case(settings)
        except UsageError as refusal:
            # Settings that go with others only.
            return study.fail(trial, f"{_listed(settings)}: {refusal}")
        record = study.records.read().get(case.id) or _measured(case, study)
        if error := error_of(record):
            return study.fail(trial, f"{_listed(settings)}: {error}")
        value = score_in(record["results"], "validation")
        print(f"trial {trial.number}: {_words(case, value, settings)}", flush=True)
        worst = -inf if case.task.score.higher_is_better else inf
        return study.tell(trial, worst if isnan(value) else value)

    def case(self, settings: Mapping[str, Any]) -> TrialRun:
        """Return the training run that is judged on validation data.

        Raises:
            UsageError: it cannot be.
        """
        comparison = self._comparison(self.space.at(settings))
        *_, case = replace(comparison, learning_rates=(comparison.task.learning_rate,)).trials(self.device)
        return case

    def command(self, settings: Mapping[str, Any], out: Path) -> str:
        """Return the command that trains with ``settings`` and backprop, with all seeds.

        Where the learning rate was sought, backprop chooses between that and the task's.
        """
        sweep = self.space.at(settings)
        if "learning_rate" in settings:
            usual = self._comparison(replace(sweep, learning_rates=None)).task.learning_rate
            sweep = replace(sweep, learning_rates=sorted({usual, settings["learning_rate"]}))
        flags = {f.name: getattr(sweep, f.name) for f in fields(sweep)}
        return command_of({**flags, "data": self.data, "device": self.device, "out": str(out)})

    def _comparison(self, sweep: Sweep) -> Comparison:
        comparison, *others = [part for part in suite_of(sweep, self.loader) if isinstance(part, Comparison)]
        if others or comparison.learning_rates or len(comparison.rows) > 2:
            raise UsageError("a search is of one task, model and engine, with one value of all that is not in --space.")
        comparison.check()
        return comparison


def _measured(case: TrialRun, study: SharedStudy) -> Record:
    with closing(Workers(1).run([case])) as records:
        (record,) = records
    study.records.append(record)
    return record


def _name(case: TrialRun, given: Mapping[str, Any]) -> str:
    """Return the study's name: others are searches for other settings, or of other tasks."""
    digest = hashlib.sha256(json.dumps([case.config, given], sort_keys=True).encode()).hexdigest()[:8]
    return f"{case.topic}/{case.row.engine}/{case.device}/{digest}"


def _words(case: TrialRun, value: float, settings: Mapping[str, Any]) -> str:
    score = case.task.score
    return f"validation {score.name} ({score.unit}) {value:.4g} with {_listed(settings)}"


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
