"""The recommendation, from a contest's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradfree.benchmarks.advice.contest import Contestant, Standings
from gradfree.benchmarks.timing.side_by_side import statistics
from gradfree.registry import engine_class
from gradfree.wording import count

AS_GOOD = 0.99
"""Minimal cosine of a gradient that is recommended."""
_DIGITS = 4
"""Decimals of a cosine."""
_AS_FAST = 1.05
"""Maximal time, relative to the fastest row's, of a row that is preferred for its more exact gradient."""


@dataclass(frozen=True)
class Advice:
    """A recommendation.

    Attributes:
        engine: label of the recommended engine; ``None`` for autograd.
        words: the recommendation with its figures.
        code: code to paste.
    """

    engine: str | None
    words: str
    code: str


def advise(standings: Standings, compiled: Mapping[str, Any] | str, chains: Sequence[str] | None) -> Advice:
    """Return the recommendation: the fastest engine that is significantly faster and has autograd's gradient, if any.

    If several are equally fast by their quartiles, and within 5 % of the fastest, it is the one with the most exact
    gradient. If torch.compile is faster than all, it is recommended.
    """
    costs = {c.row.label: standings.cost(c) for c in standings.contestants if len(c.times) > 1}
    _, *others = (c for c in standings.contestants if c.row.label in costs and c.gradient)
    faster = [c for c in others if costs[c.row.label]["ratio_quartiles"][1] < 1]
    as_good = [c for c in faster if _cosine(c) >= AS_GOOD]
    best = _best(as_good, costs) if as_good else None
    least = costs[best.row.label]["ratio_quartiles"][0] if best else 1.0
    hints = _hints(standings, faster, best, costs)
    if isinstance(compiled, Mapping) and compiled["ratio_quartiles"][1] < least:
        words = f"Stay with autograd, and compile: a step is then {_faster(compiled)}"
        if best:
            words += f"; with {best.row.label} it is {_faster(costs[best.row.label])}"
        return Advice(None, f"{words}.{hints}", "model.compile()")
    if len(standings.contestants) == 1:
        return Advice(None, f"Stay with autograd: no engine could be timed.{hints}", "")
    if best is None:
        return Advice(None, f"Stay with autograd: no engine with its gradient is faster here.{hints}", "")
    words = (
        f"Take {best.row.label}: a step is {_faster(costs[best.row.label])} than with autograd, and the gradient is "
        f"equal or nearly equal (cosine {_cosine(best):.{_DIGITS}f})."
    )
    return Advice(best.row.label, words + hints, code_for(best, chains))


def code_for(contestant: Contestant, chains: Sequence[str] | None) -> str:
    """Return the code that wraps an optimizer with the engine."""
    options = {**contestant.row.options, **({"chains": list(chains)} if chains else {})}
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"optimizer = gradfree.EngineOptimizer(optimizer, model, engine={contestant.row.engine!r}{given})"


def _best(as_good: Sequence[Contestant], costs: Mapping[str, Mapping[str, Any]]) -> Contestant:
    """Return the fastest contestant, or a more exact one that is as fast when compared with it round by round."""
    fastest = min(as_good, key=lambda c: costs[c.row.label]["ratio"])
    beside = {c.row.label: statistics(c.times, fastest.times) for c in as_good}
    near = {label for label, b in beside.items() if b["ratio"] <= _AS_FAST and b["ratio_quartiles"][0] <= 1}
    rivals = [c for c in as_good if c.row.label in near]
    # Of equal cosines, prefer exact engines, then smaller tolerances.
    return max(rivals, key=lambda c: (round(_cosine(c), _DIGITS), -_tolerance(c), -beside[c.row.label]["ratio"]))


def _tolerance(contestant: Contestant) -> float:
    """Return the engine's tolerance; 0 if it has none."""
    return float(getattr(contestant.row.create_engine(), "tolerance", None) or 0.0)


def _hints(
    standings: Standings,
    faster: Sequence[Contestant],
    best: Contestant | None,
    costs: Mapping[str, Mapping[str, Any]],
) -> str:
    """Return hints on further options: untried settings, faster but less exact gradients."""
    untried = len(standings.untried)
    words = f" {count(untried, 'setting')} had no turn: give a longer --budget." if untried else ""
    least = costs[best.row.label]["ratio_quartiles"][0] if best else 1.0
    exact = [c for c in faster if c is not best and _is_exact(c)]
    if best and not _is_exact(best) and exact:
        quickest = min(exact, key=lambda c: costs[c.row.label]["ratio"])
        words += f" With exactly autograd's gradient: {quickest.row.label} ({_faster(costs[quickest.row.label])})."
    rough = [c for c in faster if _cosine(c) < AS_GOOD and costs[c.row.label]["ratio_quartiles"][1] < least]
    if rough:
        nearest = max(rough, key=_cosine)
        words += (
            f" {nearest.row.label} is {_faster(costs[nearest.row.label])}, but its gradient is only approximate "
            f"(cosine {_cosine(nearest):.{_DIGITS}f}): see how it trains by gradfree bench run."
        )
    return words


def _faster(cost: Mapping[str, Any]) -> str:
    return f"{1 / cost['ratio']:.2f}× faster"


def _is_exact(contestant: Contestant) -> bool:
    """Return whether the engine has autograd's gradient in every model."""
    exact = bool(engine_class(contestant.row.engine).exact_ones())
    return exact and not _tolerance(contestant)


def _cosine(contestant: Contestant) -> float:
    return contestant.gradient.cosine if contestant.gradient else float("nan")
