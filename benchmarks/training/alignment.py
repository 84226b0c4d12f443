"""Alignment of an engine's cotangents and feedback weights with the exact ones, by depth and over the training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any

from gradfree import Fidelity
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Figure
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.tables.frames import pl
from gradfree.chains.site import Site

DELTA, RATIO = "cosine of δ with backpropagation's", "norm of δ by backpropagation's"
_FEEDBACK = "cosine of feedback weights with the layers' own"
_METRICS = {DELTA: ("states", "steps"), _FEEDBACK: ("feedback",)}
"""The keys in records of each metric."""
LEGEND = (
    " δ: cotangents after blocks or layers, compared with backpropagation's at the same weights; means over the "
    "training and over all blocks except the last, whose cotangent is exact. Of a recurrent layer: of all its steps, "
    "as one vector."
)


def alignment(fidelity: Fidelity, chains: Mapping[str, Site]) -> dict[str, Any]:
    """Return the alignment of cotangents behind blocks with weights, and of feedback weights, if there are any.

    Each entry starts with the relative depth, from 0 to 1; those of chains in time, "steps", with 0. Cotangents have
    cosine and norm ratio, feedback weights have the cosine.
    """
    layers = list(fidelity.layers)

    def depth(path: str) -> float:
        own = [n for n, layer in enumerate(layers, 1) if layer == path or layer.startswith(f"{path}.")]
        return round(own[-1] / len(layers), 3) if own else 0.0

    in_time = tuple(f"{path}." if path else "" for path, site in chains.items() if site.dimension == "time")
    steps = {path for path in fidelity.states if f"{path}.".startswith(in_time)} if in_time else set()
    states = [
        # The cosine of a zero vector is set to 0.
        (path, round(state.cosine, 4) if state.norm_ratio else 0.0, round(state.norm_ratio, 4))
        for path, state in fidelity.states.items()
        if isfinite(state.norm_ratio)
    ]
    found = {
        "states": [[depth(path), *known] for path, *known in states if path not in steps and depth(path)],
        "steps": [[0.0, *known] for path, *known in states if path in steps],
        "feedback": [[depth(path), round(cosine, 4)] for path, cosine in fidelity.feedback.items()],
    }
    return {key: entries for key, entries in found.items() if entries}


def aligned_facts(runs: Sequence[Record], /, **who: Any) -> Iterator[Fact]:
    """Yield the mean alignment over ``runs`` of cotangents, without the last block's, and of feedback weights.

    Also yields it by depth at the last step measured, and by step over all depths.
    """
    probes = [probe for run in runs if not error_of(run) for probe in run["results"]["fidelity"]]
    for metric, keys in _METRICS.items():
        entries = [(probe["step"], *entry[:2]) for probe in probes for key in keys for entry in _inexact(probe, key)]
        if not entries:
            continue
        yield fact(metric, "1", fmean(cosine for *_, cosine in entries), **who)
        last = max(step for step, *_ in entries)
        at_last = [("depth", depth, cosine) for step, depth, cosine in entries if step == last and depth]
        groups: defaultdict[tuple[str, float], list[float]] = defaultdict(list)
        for name, at, cosine in (*at_last, *(("step", step, cosine) for step, _, cosine in entries)):
            groups[name, at].append(cosine)
        for (name, at), found in groups.items():
            where = {"setting": f"{name} {at:g}", "at": float(at)}
            yield fact(f"{metric}, by {name}", "1", fmean(found), **who, **where)
    states = [state for probe in probes for key in _METRICS[DELTA] for state in _inexact(probe, key)]
    if states:
        yield fact(RATIO, "1", fmean(norm for *_, norm in states), **who)


def _inexact(probe: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Return the entries without the last block's cotangent, which is exact."""
    found: Sequence[Any] = probe.get(key, ())
    return found[:-1] if key == "states" else found


def aligned_charts(facts: pl.DataFrame, where: str) -> Iterator[Chart]:
    """Yield charts of the alignment by depth and by step, if there are facts."""
    for metric, what in ((DELTA, "alignment"), (_FEEDBACK, "feedback weights")):
        for name, how, x in (
            ("depth", "by depth, after the training", Axis("depth (share of the layers with weights)")),
            ("step", "over the training", Axis("step (number)")),
        ):
            if (found := points(facts, "at", Figure(f"{metric}, by {name}"), "row")).height:
                cosine = Axis(metric, bounds=(-1.0, 1.0))
                yield Chart(f"{where}: {what} {how}", found, x, cosine, lines=True, rules={"0": 0.0})
