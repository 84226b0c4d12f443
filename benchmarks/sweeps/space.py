"""What a search chooses, and from what."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from gradfree.benchmarks.sweeps.axes import Sweep
from gradfree.benchmarks.sweeps.sweep import with_options
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
