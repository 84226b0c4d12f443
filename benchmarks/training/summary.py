"""The section of a comparison: its table, verdicts and charts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isnan

from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points, runs, scale_of, score_axis
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.facts import FEWEST, Estimate, difference_to, estimates, select
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.side_by_side import MEMORY, PROCESS, STEP, legend_of_process, times
from gradfree.benchmarks.training import outcomes
from gradfree.benchmarks.training.alignment import DELTA, LEGEND, RATIO, aligned_charts
from gradfree.benchmarks.training.outcomes import CHAIN, COSINE, FAILED, FRONT, LOSS, RATE, score_metric


@dataclass(frozen=True)
class Summary:
    """The section of a comparison, made from the facts of one task and device; the first row is the baseline."""

    task: Task
    grid: tuple[float, ...]
    facts: pl.DataFrame

    @property
    def section(self) -> Section:
        """The section."""
        device, threads = self.facts.select("device", "threads").row(0)
        length = f"{self.task.steps} steps, seeds: {self._seeds}"
        return Section(
            title=f"{self.task.title}, {length}, device: {device}, threads: {threads}",
            facts=self.facts,
            columns=self._columns,
            setup=outcomes.setup_words(self.task, self._own_rates, self.facts),
            legend=self._legend,
            verdicts=[self.verdict(label) for label in self._rows],
            remarks=[*self._front_remark, *outcomes.edge_remarks(self.grid, self.facts)],
            charts=list(self._charts()),
            answer="" if self.task.evaluations else self._answer,  # With evaluations, it is the time to the target.
        )

    @cached_property
    def _rows(self) -> list[str]:
        return select(self.facts, metric=FAILED)["row"].unique(maintain_order=True).to_list()

    @property
    def _baseline(self) -> str:
        return self._rows[0]

    def _score(self, label: str) -> Estimate:
        return self._estimate(label, score_metric(self.task))

    def _difference(self, label: str) -> Estimate:
        return self._estimate(label, difference_to(self._baseline, score_metric(self.task)))

    def _ratio(self, label: str, metric: str = STEP) -> Estimate:
        return self._estimate(label, metric, unit=times(self._baseline))

    def _estimate(self, label: str, metric: str, **where: str) -> Estimate:
        return estimates(self.facts, metric=metric, row=label, **where).get(label, Estimate())

    def verdict(self, label: str) -> str:
        """Return a sentence on a row's speed, memory and score relative to the baseline's."""
        words = "the baseline"
        if label != self._baseline:
            words = verdict.speed(self._ratio(label), self._baseline)
            memory = self._ratio(label, MEMORY)
            words += (
                "" if isnan(memory.value) or f"{memory.value:.2f}" == "1.00" else f" at {memory.value:.2f}× the memory"
            )
            words += ", " + verdict.score(
                self.task.score.name, self._difference(label), self.task.score.higher_is_better
            )
        failed = select(self.facts, metric=FAILED, row=label).row(0, named=True)
        count = int(failed["value"])
        if not count:
            return words
        return f"{words}; failed with {count} of {count + self._score(label).n} seeds: {failed['note']}"

    @cached_property
    def _seeds(self) -> int:
        return max(int(self._estimate(label, FAILED).value) + self._score(label).n for label in self._rows)

    @property
    def _legend(self) -> str:
        step = self._estimate(self._baseline, STEP, unit="s")
        ms = [f"{1e3 * seconds:.1f}" for seconds in (step.value, step.low, step.high)]
        absolute = "" if isnan(step.value) else f" ({ms[0]} ms, quartiles {ms[1]} and {ms[2]})"
        fewest = min(self._score(label).n or self._seeds for label in self._rows)
        legend = (
            f"±: {verdict.interval(self._seeds, fewest)}. ×: a training step on one batch, as a multiple of the first "
            f"row's{absolute}; median and quartiles of interleaved rounds. "
            f"{self._cosine_words} In words: difference in test {self.task.score.name} to the first row, seed by seed."
        )
        if self.grid:
            rates = ", ".join(f"{rate:g}" for rate in self.grid)
            legend += f" Rate: the learning rate of {rates} with the best validation score, with another seed."
        return legend + legend_of_process(self.facts) + (LEGEND if DELTA in self.facts["metric"] else "")

    @property
    def _knows_chains(self) -> bool:
        """Whether the records have the cosine without the head, as old ones have not."""
        return CHAIN in self.facts["metric"]

    @property
    def _cosine(self) -> tuple[str, str]:
        """The heading and the metric of the cosine."""
        return ("cosine of the chains", CHAIN) if self._knows_chains else ("cosine with the head", COSINE)

    @property
    def _cosine_words(self) -> str:
        of = "Cosine: between the engine's gradient and the exact one, mean over the training"
        if self._knows_chains:
            return f"{of}; of the chains' own parameters, since the head's gradient is exact with every engine."
        return f"{of}; of all parameters. The head's gradient is exact with every engine and may outweigh the chains'."

    @property
    def _columns(self) -> list[Column]:
        score, ratio = self.task.score, times(self._baseline)
        columns = [
            column(f"test {score.name} ({score.unit})", score_metric(self.task), "{value:.2f} ± {margin:.2f}"),
            column("step time (×)", STEP, unit=ratio),
            column("quartiles", STEP, "{low:.2f}–{high:.2f}", unit=ratio),
            column("peak memory (MiB)", MEMORY, "{value:.1f}", unit="MiB"),
            column("peak memory (×)", MEMORY, unit=ratio),
            *([column("process peak (MiB)", PROCESS, "{value:.0f}")] if PROCESS in self.facts["metric"] else []),
            column(
                *(("cosine of the chains", CHAIN) if self._knows_chains else ("cosine with the head", COSINE)),
                "{value:.3f}",
            ),
        ]
        if DELTA in self.facts["metric"]:
            columns += [column("δ cosine", DELTA, "{value:.3f}"), column("δ norm ratio", RATIO, "{value:.3g}")]
        return columns + ([column("rate", RATE, "{value:g}")] if self._own_rates else [])

    @property
    def _own_rates(self) -> bool:
        """Whether the rows have learning rates of their own."""
        return bool(self.grid) or select(self.facts, metric=RATE)["value"].drop_nulls().n_unique() > 1

    @cached_property
    def _front(self) -> list[str]:
        """The rows on the Pareto front of step time and test score, the slowest, which have the best scores, first."""
        front = select(self.facts, metric=FRONT, value=1.0)["row"].to_list()
        return sorted(front, key=lambda label: -self._ratio(label).value)

    @property
    def _front_remark(self) -> list[str]:
        words = (
            f"Pareto front of step time and test {self.task.score.name}, best score first, with differences seed by "
            "seed"
        )
        scores = {label: self._difference(label).value for label in self._front}
        named = [
            label if label == self._baseline or isnan(score) else f"{label} ({verdict.signed(score)})"
            for label, score in scores.items()
        ]
        return [f"{words}: {', '.join(named)}."] if named else []

    @property
    def _answer(self) -> str:
        """Return which row is the fastest among those with a score that is not worse."""
        name, score = f"{self.task.name}, {self.task.steps} steps", self._score(self._baseline)
        if score.n and isnan(score.value):
            return (
                f"{name}: nothing can be compared, as {self._baseline} diverged: try lower learning rates, see the "
                "data."
            )
        others = {label: self._ratio(label) for label in self._rows[1:] if self._difference(label).n}
        others = {label: ratio for label, ratio in others.items() if not isnan(ratio.value)}
        judged = [label for label in others if self._difference(label).n >= FEWEST]
        if others and not judged:
            best = min(others, key=lambda label: others[label].value)
            question = f"{verdict.FEW} whether a row keeps {self._baseline}'s {self.task.score.name}"
            return f"{name}: {question}; the fastest is {best}: {self.verdict(best)}."
        kept = [label for label in judged if self._is_kept(label)]
        if not kept:
            return f"{name}: no row comes up to {self._baseline} in {self.task.score.name}." if others else ""
        best = min(kept, key=lambda label: others[label].value)
        words = f"no worse {self.task.score.name} seen"
        if others[best].high < 1:
            return f"{name}: {best} is the fastest row with {words}: {self.verdict(best)}."
        nearest = f"the nearest is {best}: {self.verdict(best)}"
        return f"{name}: no row is faster than {self._baseline} with {words}; {nearest}."

    def _is_kept(self, label: str) -> bool:
        """Return whether a row's score is not significantly worse, and its mean is within the baseline's interval."""
        difference, margin = self._difference(label), self._score(self._baseline).margin
        outcome, _ = verdict.change(difference, self.task.score.higher_is_better)
        loss = -difference.value if self.task.score.higher_is_better else difference.value
        # A wide interval around 0 is not enough to recommend a row.
        return outcome != "worse" and loss <= (0.0 if isnan(margin) else margin)

    def _charts(self) -> Iterator[Chart]:
        """Yield charts of the score against step time, of the alignment of cotangents, and of losses."""
        score, where = self.task.score, f"{self.task.name}, {self.task.steps} steps, {self.facts['device'][0]}"
        if self._front:
            found = points(self.facts, Figure(STEP, unit=times(self._baseline)), Figure(score_metric(self.task)))
            yield Chart(
                f"{where}: {score.name} against step time",
                found.with_columns(ringed=pl.col("row").is_in(self._front)),
                Axis(f"step time, as a multiple of {self._baseline}'s (×)"),
                score_axis("test", score, "linear" if score.higher_is_better else scale_of(found["y"].to_list())),
                lines=True,
                ringed="Pareto front",
            )
        yield from aligned_charts(self.facts, where)
        losses = runs(self.facts, LOSS)
        if losses.height:
            axis = Axis("training loss (mean of a batch)", scale_of(losses["y"].to_list()))
            seconds = {row: step.value for row, step in estimates(self.facts, metric=STEP, unit="s").items()}
            if seconds:
                of_row = pl.col("row").replace_strict(seconds, default=None, return_dtype=pl.Float64)
                timed = losses.with_columns(x=pl.col("x") * of_row).drop_nulls("x")
                yield Chart(f"{where}: training loss against time", timed, Axis("time of the steps (s)"), axis, True)
            yield Chart(f"{where}: training loss", losses, Axis("step (number)"), axis, True)
