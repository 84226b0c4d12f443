"""Experiments that time interleaved steps: a function that returns a builder of each step, and a declaration.

The declaration (:func:`timed`) names the figures and says how to show them. Turns, medians, quartiles, ratios,
failures, verdicts and charts are the same for all experiments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from traceback import format_exception
from typing import Any

import torch

from gradfree.benchmarks.records.case import Case, Row, recorded
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.running.workers import run_here
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Cell, Column, Figure, column
from gradfree.benchmarks.tables.experiment import Experiment, records_of_case
from gradfree.benchmarks.tables.facts import Estimate, Fact, estimate_of, estimates, fact, select, table
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import ENGINE, Section
from gradfree.benchmarks.timing.allocations import peak_memory, process_peak
from gradfree.benchmarks.timing.side_by_side import (
    MEMORY,
    PROCESS,
    RATIO,
    STEP,
    Trainee,
    collecting_errors,
    cost_facts,
    interleaved,
    legend_of_process,
    mean_seconds,
    statistics,
    times,
)
from gradfree.devices.hardware import cpu_threads

_ERROR = "error"
_LISTED = 3
"""A title lists the subjects if there are at most this many."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Timed:
    """The declaration of an experiment on interleaved steps.

    Attributes:
        steps: returns, by label, functions that build the steps of a case; the first is the baseline. A step that
            returns its seconds is timed by them.
        kind: the kind of its cases in records.
        subject: the name in records of what is run.
        metric: the name of a step's time.
        rounds: number of rounds, in each of which every step has a turn; a warm-up comes before.
        repeats: the most sets of ``rounds`` rounds; another one follows as long as a row's ratio is not steady.
        runs: number of runs of a step in a turn.
        with_memory: whether memory is measured, too: the peak of live tensors, and on a CPU that of a process.
        rebuild: whether steps are built again after the warm-up.
        title: the section's title.
        legend: the section's legend: what is measured.
        names: the table's columns that name a row: heading to column of the facts.
        columns: the table's other columns; by default times, and their multiples of the baseline's (:data:`RATIO`).
        across: column of the facts, "row" or "setting"; the table's columns are repeated for each of its values.
        display_names: names in reports for recorded labels, where they differ.
        place: returns the facts' columns that identify a subject.
        fits: returns whether a row can run on a subject.
        costs: returns further results to record, given the case, the step and its turns.
        facts: yields further facts, given a row's record and the case's results with the baseline's name, ``baseline``.
        against: a figure and its axis; a chart of the time against it is drawn.
        limit: the report names each row that takes more than this multiple of the baseline's time.
    """

    steps: Callable[[Timing], Mapping[str, Callable[[], Any]]]
    kind: str
    subject: str = "subject"
    metric: str = STEP
    rounds: int = 9
    repeats: int = 3
    runs: int = 3
    with_memory: bool = False
    rebuild: bool = False
    title: str = "time of a step"
    legend: str = ""
    names: Mapping[str, str] = field(default_factory=lambda: ENGINE)
    columns: Sequence[Column] = ()
    across: str = ""
    display_names: Mapping[str, str] = field(default_factory=dict)
    place: Callable[[Any], dict[str, Any]] = lambda subject: {"setting": str(subject)}
    fits: Callable[[Row, Any], bool] = lambda row, subject: True
    costs: Callable[[Timing, Any, Sequence[float]], dict[str, Any]] = lambda case, step, turns: {}
    facts: Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[Fact]] = lambda cost, results: iter(())
    against: tuple[Figure, Axis] | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        # Pickled by reference, like the function that it decorates and whose name it has in the module.
        object.__setattr__(self, "__module__", self.steps.__module__)

    def __reduce__(self) -> str:
        return self.steps.__qualname__


def timed(**declared: Any) -> Callable[[Callable[[Timing], Mapping[str, Callable[[], Any]]]], Timed]:
    """Return a decorator that turns a function into a :class:`Timed` with the fields ``declared``."""
    return lambda steps: Timed(steps=steps, **declared)


@dataclass(frozen=True, kw_only=True)
class Timing(Case):
    """The case that times several steps in one process.

    The steps take turns, so that a slow phase of the machine affects all of them. Each round's times are divided by
    the baseline's in the same round. If a step fails, the others are timed all the same.

    Attributes:
        timed: the declaration.
        item: the subject that is run.
        rows: the engines under test; none if no engines are compared.
        threads: number of threads of torch; by default torch's own.
        more: further settings, which are part of the case's config.
    """

    timed: Timed
    item: Any
    rows: tuple[Row, ...] = ()
    threads: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The declaration's kind."""
        return self.timed.kind

    @property
    def topic(self) -> str:
        """The name of the subject."""
        return str(self.item)

    @property
    def subject(self) -> str:
        """The description of the steps."""
        return "all rows" if self.threads is None else f"all rows, {self.threads} threads"

    @property
    def config(self) -> dict[str, Any]:
        """All settings but the seed; fields that are ``None`` or empty have no entry."""
        given = {"rows": self.rows or None, "threads": self.threads}
        own = {name: value for name, value in given.items() if value is not None}
        found: dict[str, Any] = recorded({"device": self.device, self.timed.subject: self.item, **self.more, **own})
        return found

    def run(self) -> dict[str, Any]:
        """Return for each row its times in seconds, ratios to the baseline and other costs, or its error."""
        on_cpu = torch.device(self.device).type == "cpu"
        # Nothing may run beside the timing, and a process that is forked after it would begin with its memory.
        with_peaks = self.timed.with_memory and on_cpu and process_peak()
        peaks = {label: self._process_peak(label) for label in self.timed.steps(self)} if with_peaks else {}
        rows = [{**row, **peaks.get(row["label"], {})} if "time" in row else row for row in self._timed_rows()]
        return {"rows": rows}

    def _process_peak(self, label: str) -> dict[str, Any]:
        """Return the peak memory of a new process that runs a step; nothing if the process fails."""
        # The step may have times all the same.
        with suppress(Exception):
            (record,) = run_here([StepProcess(**vars(self), label=label)])
            return record["results"]
        return {}

    def _timed_rows(self) -> list[dict[str, Any]]:
        """Return the results of each row that one process can measure."""
        with cpu_threads(self.threads or torch.get_num_threads()):
            steps, errors = self._started()
            turns = [partial(self._turn, *started) for started in steps.values()]
            seconds = interleaved(turns, self.timed.rounds, self.timed.repeats)
        taken = dict(zip(steps, seconds, strict=True))
        baseline = next(iter(taken.values()))
        found = {
            label: {"label": label, **statistics(own, baseline), **self._costs(steps[label][0], own)}
            for label, own in taken.items()
        }
        found |= {label: {"label": label, "error": error} for label, error in errors.items()}
        return [found[label] for label in self.timed.steps(self)]

    def _turn(self, step: Callable[[], Any], self_timed: bool) -> float:
        """Run a step ``runs`` times; return the mean seconds."""
        if self_timed:
            return fmean(step() for _ in range(self.timed.runs))
        return mean_seconds(step, self.timed.runs)

    def _costs(self, step: Any, turns: Sequence[float]) -> dict[str, Any]:
        costs = self.timed.costs(self, step, turns)
        if not self.timed.with_memory:
            return costs
        own = getattr(step, "peak_memory", None)
        return {"peak_memory": own() if own else peak_memory(step, self.device), **costs}

    def _started(self) -> tuple[dict[str, tuple[Any, bool]], dict[str, str]]:
        """Return the steps whose first turn succeeds, each with whether it times itself, and the others' errors."""
        steps: dict[str, tuple[Any, bool]] = {}
        errors: dict[str, str] = {}
        for label, build in self.timed.steps(self).items():
            # An error of the baseline is raised: without it there are no ratios.
            with collecting_errors(errors, label, _traceback) if steps else nullcontext():
                step = build()
                self_timed = isinstance(step(), float)
                self._turn(step, self_timed)
                steps[label] = build() if self.timed.rebuild else step, self_timed
        return steps, errors


def _traceback(error: Exception) -> str:
    return "".join(format_exception(error)).strip()


@dataclass(frozen=True, kw_only=True)
class StepProcess(Timing):
    """The case that runs one row's step in a process of its own, and results in that process's peak memory."""

    label: str

    def run(self) -> dict[str, Any]:
        """Build the step, and run it twice: the first call may allocate what later ones find."""
        with cpu_threads(self.threads or torch.get_num_threads()):
            step = self.timed.steps(self)[self.label]()
            step()
            step()
        return {"process_peak": process_peak()}


@dataclass(frozen=True)
class Timings(Experiment):
    """The experiment that runs a :class:`Timed` on some subjects.

    Attributes:
        timed: the declaration.
        subjects: layers, models or tasks.
        rows: the engines; none if no engines are compared.
        threads: number of threads of torch; by default torch's own.
        title: replaces the declaration's title.
        more: returns further settings of a subject's case.
    """

    timed: Timed
    subjects: tuple[Any, ...]
    rows: tuple[Row, ...] = ()
    threads: int | None = None
    title: str = ""
    more: Callable[[Any], Mapping[str, Any]] = lambda subject: {}

    def timing(self, device: str) -> Iterator[Timing]:
        """Yield one case for each subject."""
        for item in self.subjects:
            rows = tuple(row for row in self.rows if self.timed.fits(row, item))
            where: dict[str, Any] = {"threads": self.threads, "device": device, "seed": 0}
            yield Timing(timed=self.timed, item=item, rows=rows, more=self.more(item), **where)

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return the costs of each row; an empty table if all cases failed."""
        found = table(
            {"device": device, "threads": self.threads} | self.timed.place(case.item) | known
            for case in self.timing(device)
            for record in records_of_case(records, case)
            for known in self._facts_of(record)
        )
        return found if found["value"].count() else found.clear()

    def _facts_of(self, record: Record) -> Iterator[Fact]:
        """Yield the facts of each row in a case's record."""
        results = record["results"]
        for cost in results.get("rows", ()):
            who = self._named(cost["label"])
            if "error" in cost:
                yield fact(_ERROR, "", note=cost["error"].splitlines()[-1], **who)
            baseline = {**results["rows"][0], "label": self._named(results["rows"][0]["label"])["row"]}
            yield from cost_facts(cost, baseline, self.timed.metric, **who)
            yield from (one | who for one in self.timed.facts(cost, {**results, "baseline": baseline["label"]}))

    def _named(self, label: str) -> dict[str, Any]:
        """Return the facts' columns that identify the step recorded as ``label``."""
        name = self.timed.display_names.get(label, label)
        row = {row.label: row for row in self.rows}.get(label)
        return row.fact_columns if row and name == label else {"row": name, "series": name, "k": None}

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the section with the table, a verdict on each of its rows, and the chart of times."""
        baseline = next(unit[2:] for unit in facts["unit"].drop_nulls() if unit.startswith(f"{RATIO} "))
        ratios = select(facts, metric=self.timed.metric, unit=times(baseline)).drop_nulls(["value", "low"])
        several = facts["setting"].n_unique() > 1
        spreads = {
            f"{row['row']} on {row['setting']}" if several else row["row"]: estimate_of(row)
            for row in ratios.iter_rows(named=True)
        }
        errors = select(facts, metric=_ERROR).select("setting", "row", "note").iter_rows()
        failed = [f"{', '.join(filter(None, names))} did not run: {error}." for *names, error in errors]
        section = Section(
            title=self._title(facts),
            facts=facts,
            names=self.timed.names,
            columns=list(self._columns(facts, baseline)),
            legend=f"{self.timed.legend} Medians of {self._rounds()}; ×: as a multiple of {baseline}'s in the same "
            f"round.{legend_of_process(facts)}".strip(),
            remarks=[*self._remarks(spreads, baseline), *failed],
            charts=list(self._charts(facts, baseline, "setting" if several else "row")),
        )
        verdicts = [self._verdict(row, ratios, baseline) for row in section.rows] if spreads else []
        return replace(section, verdicts=verdicts)

    def _rounds(self) -> str:
        fewest, most = self.timed.rounds, self.timed.rounds * self.timed.repeats
        return f"{fewest} interleaved rounds" + (f", of up to {most} where quartiles are wide" if most > fewest else "")

    def _remarks(self, ratios: Mapping[str, Estimate], baseline: str) -> Iterator[str]:
        """Yield sentences on the ratios of times: which are beyond the limit, and how steady they are."""
        if ratios and self.timed.limit is not None:
            yield verdict.beyond(ratios, self.timed.limit, baseline)
        if ratios:
            yield verdict.steadiness(ratios)

    def _title(self, facts: pl.DataFrame) -> str:
        threads = "" if self.threads is None else f", threads: {self.threads}"
        listed = f": {', '.join(map(str, self.subjects))}" if len(self.subjects) <= _LISTED else ""
        return f"{self.title or self.timed.title + listed}, device: {facts['device'][0]}{threads}"

    def _columns(self, facts: pl.DataFrame, baseline: str) -> Iterator[Column]:
        """Yield the declared or default columns, once for each value of :attr:`Timed.across`."""
        ratio, memory = Figure(self.timed.metric, unit=RATIO), Figure(MEMORY, "{value:.1f}", RATIO)
        time, process = Figure(self.timed.metric, "{value:.1f}", "s", 1e3), Figure(PROCESS, "{value:.0f} MiB")
        usual = [
            Column("time (ms)", (time,)),
            Column("time (×)", (ratio,)),
            Column("quartiles", (replace(ratio, template="{low:.2f}–{high:.2f}"),)),
            Column("peak memory (×)", (memory,)),
            column("process peak (MiB)", PROCESS, "{value:.0f}"),
        ]
        if self.timed.across == "row":
            yield Column(f"{baseline} (ms)", (time, process), {"row": baseline})
            usual = [Column("", (ratio, memory, process))]
        # Many records have no memory or no process peak.
        shown = [one for one in self.timed.columns or usual if one.figures[0].metric in facts["metric"]]
        declared = [_with_unit(one, times(baseline)) for one in shown]
        if not self.timed.across:
            yield from declared
            return
        for value in facts[self.timed.across].drop_nulls().unique(maintain_order=True).to_list():
            if value == baseline:
                continue
            for one in declared:
                where = {**one.where, self.timed.across: value}
                name = f"{value:g}" if isinstance(value, float) else value
                yield replace(one, heading=f"{name} {one.heading}".strip(), where=where)

    def _verdict(self, row: Sequence[Cell], ratios: pl.DataFrame, baseline: str) -> str:
        """Return the verdict on a row of the table: one engine on each subject, or all engines on one subject."""
        names = dict(zip(self.timed.names.values(), (cell.text for cell in row), strict=False))
        if names.get("row") == baseline:
            return "the baseline"
        if "row" in names:
            speeds = {at: verdict.speed(ratio, baseline) for at, ratio in estimates(ratios, "setting", **names).items()}
            return (
                "; ".join(f"{at}: {words}" if len(speeds) > 1 else words for at, words in speeds.items()) or "not timed"
            )
        engines, others = {self._named(row.label)["row"] for row in self.rows}, estimates(ratios, **names)
        own = {label: others[label] for label in others if label != baseline and (label in engines or not engines)}
        if not own:
            return "failed"
        best = min(own, key=lambda label: own[label].value)
        words = "fastest is" if own[best].high < 1 else f"none is faster than {baseline}; the nearest is"
        return f"{words} {best}, {verdict.speed(own[best], baseline)}"

    def _charts(self, facts: pl.DataFrame, baseline: str, names: str) -> Iterator[Chart]:
        title, ratio = self._title(facts), Figure(self.timed.metric, unit=times(baseline))
        side = Axis(f"time, as a multiple of {baseline}'s (×)", "log")
        found = points(facts.filter(pl.col("row") != baseline), ratio, names, "row")
        heading = {place: heading for heading, place in self.timed.names.items()}.get(names, "engine")
        yield Chart(title, found, side, Axis(heading, "names"), rules={baseline: 1.0})
        if self.timed.against:
            figure, axis = self.timed.against
            found = points(facts, figure, ratio, "row")
            yield Chart(f"{title}: time against {figure.metric}", found, axis, side)


def _with_unit(declared: Column, unit: str) -> Column:
    figures = tuple(replace(one, unit=unit) if one.unit == RATIO else one for one in declared.figures)
    return replace(declared, figures=figures)


@timed(kind="speed", subject="task", with_memory=True)
def speed(case: Timing) -> Mapping[str, Callable[[], Trainee]]:
    """Return, by row, a function that builds the task's model in training with the row's engine."""
    return {row.label: partial(Trainee.of, case.item, row, case.device, case.seed) for row in case.rows}
