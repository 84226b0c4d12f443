"""One measurement of a benchmark: what is measured, and the name that its record is found by."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

from gradfree import Engine, create_engine
from gradfree.benchmarks.records.names import recorded_class, recorded_name, recorded_source
from gradfree.registry import engine_class

ADDED = {"omit_default": True}
"""Metadata of a dataclass field that came after records had been written: at its default it is not in a case's
:attr:`Case.config`, so that cases keep their ids."""


@dataclass(frozen=True)
class Row:
    """An engine under test.

    Attributes:
        label: for people.
        engine: name of a registered engine, or the import path of another, ``module:Class``; the files of engines
            that are not ours are part of a case's id.
        options: of the engine.
    """

    label: str
    engine: str
    options: Mapping[str, Any]

    def create_engine(self) -> Engine:
        """Return the engine."""
        return create_engine(self.engine, **self.options)

    @property
    def iterations(self) -> int | None:
        """The engine's sweeps, if it is given."""
        return self.options.get("iterations")

    @property
    def name(self) -> str:
        """The label in reports: what runs without an engine is autograd, whatever records call it."""
        plain = self.engine == "backprop" and self.options.get("plain")
        return self.label.replace("backprop", "autograd", 1) if plain else self.label

    @property
    def named(self) -> dict[str, Any]:
        """What tells its facts from other rows'."""
        return {"row": self.name, "series": self.series, "k": self.iterations}

    @property
    def series(self) -> str:
        """The label of the line in a plot that the row is a point of: an engine with several k, or itself alone."""
        if self.iterations is None:
            return self.name
        return f"{self.label.replace(f' k={self.iterations}', '')} with k iterations"


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One measurement, run in a process of its own and recorded when it is done.

    Attributes:
        kind: of measurement.
        alone: whether nothing else may run meanwhile, as with whatever is timed.
        topic_field: the name of the field that has what is run.
        device: where.
        seed: of all random numbers.
    """

    kind: ClassVar[str]
    alone: ClassVar[bool] = True
    topic_field: ClassVar[str] = "task"
    device: str
    seed: int

    @property
    def topic(self) -> str:
        """What is run, a task, a model or a layer, for people."""
        return str(getattr(self, self.topic_field))

    @property
    @abstractmethod
    def subject(self) -> str:
        """What of the topic is measured, for people."""

    @abstractmethod
    def run(self) -> dict[str, Any]:
        """Measure; return the results as JSON has them."""

    @property
    def config(self) -> dict[str, Any]:
        """All that the results depend on but the seed, as JSON has it; functions by name.

        The class of the case is not in it: :attr:`kind` tells.
        """
        config = _fields(self)
        del config["seed"]
        return recorded(config)

    @property
    def id(self) -> str:
        """Name the case for people and, by a hash of :attr:`config`, beyond doubt."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.kind}/{self.topic}/{self.subject}/{self.device}/seed {self.seed}/{digest}"


def recorded(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as records have them: JSON, with functions by name."""
    found: dict[str, Any] = json.loads(json.dumps(_plain(value), default=recorded_name))
    return found


def _plain(value: Any) -> Any:
    """Return dataclasses as dicts."""
    if is_dataclass(value) and not isinstance(value, type):
        source = recorded_source(engine_class(value.engine)) if isinstance(value, Row) else {}
        return {**recorded_class(type(value)), **_fields(value), **source}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, without those that :data:`ADDED` leaves out."""
    kept = [f for f in fields(value) if not (f.metadata == ADDED and getattr(value, f.name) == f.default)]
    return {f.name: _plain(getattr(value, f.name)) for f in kept}
