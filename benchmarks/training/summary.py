"""The section of a comparison: its table, verdicts and charts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isnan

from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points, runs, score_axis
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.facts import Estimate, difference_to, estimates, select
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.side_by_side import MEMORY, PROCESS, STEP, legend_of_process, times
from gradfree.benchmarks.training.alignment import DELTA, LEGEND, RATIO, aligned_charts
from gradfree.benchmarks.training.outcomes import COSINE, FAILED, FRONT, LOSS, RATE, score_metric, setup_words

_FAR = 10.0
"""An axis is logarithmic if the largest value is more than this many times the smallest."""


@dataclass(frozen=True)
class Summary:
    """The section of a comparison, made from the facts of one task and device; the first row is the baseline."""

    task: Task
    grid: tuple[float, ...]
    facts: pl.DataFrame

    @property
    def section(self) -> Section:
        """The section."""
        return Section(
            title=self._title,
            facts=self.facts,
            columns=self._columns,
            setup=setup_words(self.task, self.facts),
            legend=self._legend,
            verdicts=[self.verdict(label) for label in self.rows],
            remarks=list(self._remarks()),
            charts=list(self._charts()),
            answer=self._answer,
        )

    @cached_property
    def rows(self) -> list[str]:
        """The labels of the rows."""
        return select(self.facts, metric=FAILED)["row"].unique(maintain_order=True).to_list()

    @property
    def baseline(self) -> str:
        """The label of the first row."""
        return self.rows[0]

    def verdict(self, label: str) -> str:
        """Return a sentence on a row's speed, memory and score relative to the baseline's."""
        if label == self.baseline:
            words = "the baseline"
        else:
            words = self._cost(label)
            words += verdict.score(self.task.score.name, self._difference(label), self.task.score.higher_is_better)
        failed = select(self.facts, metric=FAILED, row=label).row(0, named=True)
        count = int(failed["value"])
        if not count:
            return words
        return f"{words}; failed with {count} of {count + self._score(label).n} seeds: {failed['note']}"

    def _cost(self, label: str) -> str:
        """Return the part of the sentence on speed and memory."""
        words = verdict.speed(self._ratios.get(label, Estimate()), self.baseline)
        if label in self._memory and (memory := f"{self._memory[label].value:.2f}") != "1.00":
            words += f" at {memory}× the memory"
        return f"{words}, "

    def _difference(self, label: str) -> Estimate:
        return self._differences.get(label, Estimate())

    def _score(self, label: str) -> Estimate:
        return self._scores.get(label, Estimate())

    @cached_property
    def _differences(self) -> dict[str, Estimate]:
        return estimates(self.facts, metric=difference_to(self.baseline, score_metric(self.task)))

    @cached_property
    def _ratios(self) -> dict[str, Estimate]:
        return estimates(self.facts, metric=STEP, unit=times(self.baseline))

    @cached_property
    def _memory(self) -> dict[str, Estimate]:
        return estimates(self.facts, metric=MEMORY, unit=times(self.baseline))

    @cached_property
    def _scores(self) -> dict[str, Estimate]:
        return estimates(self.facts, metric=score_metric(self.task))

    @property
    def _seeds(self) -> int:
        failed = estimates(self.facts, metric=FAILED)
        return max(int(failed[label].value) + self._score(label).n for label in self.rows)

    @property
    def _title(self) -> str:
        device, threads = self.facts.select("device", "threads").row(0)
        # With a model of the user, the task has the model's name.
        named = self.task.name.startswith(self.task.model)
        what = self.task.name if named else f"{self.task.name}: {self.task.model}"
        return f"{what}, {self.task.steps} steps, seeds: {self._seeds}, device: {device}, threads: {threads}"

    @property
    def _legend(self) -> str:
        name = self.task.score.name
        step = estimates(self.facts, metric=STEP, unit="s").get(self.baseline)
        absolute = (
            ""
            if step is None
            else " ({:.1f} ms, quartiles {:.1f} and {:.1f})".format(
                *(1e3 * seconds for seconds in (step.value, step.low, step.high))
            )
        )
        legend = (
            f"±: 95 % confidence interval of the mean over seeds (Student's t, n = {self._seeds}). ×: one training "
            f"step as a multiple of the first row's{absolute}; median and quartiles of interleaved rounds. Cosine: "
            "between the engine's gradient and the exact one, mean over the training. In words: difference "
            f"in test {name} to the first row, seed by seed."
        )
        if self.grid:
            legend += f" Rate: the learning rate of {self._rates} with the best validation score, with another seed."
        return legend + legend_of_process(self.facts) + (LEGEND if DELTA in self.facts["metric"] else "")

    @property
    def _columns(self) -> list[Column]:
        score, ratio = self.task.score, times(self.baseline)
        columns = [
            column(f"test {score.name} ({score.unit})", score_metric(self.task), "{value:.2f} ± {margin:.2f}"),
            column("step time (×)", STEP, unit=ratio),
            column("quartiles", STEP, "{low:.2f}–{high:.2f}", unit=ratio),
            column("peak memory (MiB)", MEMORY, "{value:.1f}", unit="MiB"),
            column("peak memory (×)", MEMORY, unit=ratio),
            *([column("process peak (MiB)", PROCESS, "{value:.0f}")] if PROCESS in self.facts["metric"] else []),
            column("cosine", COSINE, "{value:.3f}"),
        ]
        if DELTA in self.facts["metric"]:
            columns += [column("δ cosine", DELTA, "{value:.3f}"), column("δ norm ratio", RATIO, "{value:.3g}")]
        return columns + ([column("rate", RATE, "{value:g}")] if self.grid or self._rates_differ else [])

    @property
    def _rates_differ(self) -> bool:
        return len({rate.value for rate in estimates(self.facts, metric=RATE).values()}) > 1

    @property
    def _front(self) -> list[str]:
        """The rows on the Pareto front of step time and test score, by time."""
        on = [label for label, front in estimates(self.facts, metric=FRONT).items() if front.value]
        return sorted(on, key=lambda label: self._ratios[label].value)

    def _remarks(self) -> Iterator[str]:
        """Yield the Pareto front, and the rows whose best learning rate is at the edge of the grid."""
        if self._front:
            front = ", ".join(self._front)
            yield (
                f"Pareto front of step time and test {self.task.score.name}, by differences seed by seed, fastest "
                f"first: {front}."
            )
        rates = estimates(self.facts, metric=RATE)
        ends = self.grid[:1] + self.grid[-1:]
        edge = [f"{label} ({rate.value:g})" for label, rate in rates.items() if rate.value in ends]
        if edge:
            yield f"Best learning rate at the edge of {self._rates}, maybe better beyond it: {', '.join(edge)}."

    @property
    def _rates(self) -> str:
        return ", ".join(f"{rate:g}" for rate in self.grid)

    @property
    def _answer(self) -> str:
        """Return which row is the fastest among those with a score that is not worse."""
        if self.task.evaluations:  # Then the answer is the time to the target.
            return ""
        others = [label for label in self._differences if label in self._ratios and label != self.baseline]
        kept = [label for label in others if self._is_kept(label)]
        name = f"{self.task.name}, {self.task.steps} steps"
        if self._score(self.baseline).n and isnan(self._score(self.baseline).value):
            return (
                f"{name}: nothing can be compared, as {self.baseline} diverged: try lower learning rates, see the data."
            )
        if not kept:
            return f"{name}: no row comes up to {self.baseline} in {self.task.score.name}." if others else ""
        best = min(kept, key=lambda label: self._ratios[label].value)
        worse = f"no worse {self.task.score.name} seen"
        if self._ratios[best].high < 1:
            return f"{name}: {best} is the fastest row with {worse}: {self.verdict(best)}."
        return (
            f"{name}: no row is faster than {self.baseline} with {worse}; the nearest is {best}: {self.verdict(best)}."
        )

    def _is_kept(self, label: str) -> bool:
        """Return whether a row's score is not significantly worse, and its mean is within the baseline's interval."""
        difference, exact = self._difference(label), self._scores[self.baseline]
        outcome, _ = verdict.change(difference, self.task.score.higher_is_better)
        loss = -difference.value if self.task.score.higher_is_better else difference.value
        # A wide interval around 0 is not enough to recommend a row.
        return outcome != "worse" and loss <= (0.0 if isnan(exact.margin) else exact.margin)

    def _charts(self) -> Iterator[Chart]:
        """Yield charts of the score against step time, of the alignment of cotangents, and of losses."""
        where = f"{self.task.name}, {self.task.steps} steps, {self.facts['device'][0]}"
        if self._front:
            yield self._cost_chart(f"{where}: {self.task.score.name} against step time")
        yield from aligned_charts(self.facts, where)
        losses = runs(self.facts, LOSS)
        if known := losses["y"].to_list():
            far = 0.0 < _FAR * min(known) < max(known)
            axis = Axis("training loss (mean of a batch)", "log" if far else "linear")
            yield Chart(f"{where}: training loss", losses, Axis("step (number)"), axis, True)

    def _cost_chart(self, title: str) -> Chart:
        ratio = Figure(STEP, unit=times(self.baseline))
        found = points(self.facts, ratio, Figure(score_metric(self.task)))
        values = found["y"].to_list()
        far = not self.task.score.higher_is_better and 0.0 < _FAR * min(values) < max(values)
        exact = self._score(self.baseline)
        return Chart(
            title,
            found.with_columns(ringed=pl.col("row").is_in(self._front)),
            Axis(f"step time, as a multiple of {self.baseline}'s (×)"),
            score_axis("test", self.task.score, "log" if far else "linear"),
            lines=True,
            band={} if isnan(exact.low) else {f"{self.baseline}'s interval": (exact.low, exact.high)},
            ringed="Pareto front",
        )
