"""Cases: single measurements of a benchmark, and the ids by which their records are found."""

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
"""Metadata of a dataclass field that was added after records had been written. At its default the field is not part of
:attr:`Case.config`, so that old cases keep their ids."""


@dataclass(frozen=True)
class Row:
    """An engine under test: one row of a table.

    Attributes:
        label: name of the row.
        engine: name of a registered engine, or the import path ``module:Class`` of another one. The source files of
            engines outside gradfree are part of a case's id.
        options: options of the engine.
    """

    label: str
    engine: str
    options: Mapping[str, Any]

    def create_engine(self) -> Engine:
        """Return the engine."""
        return create_engine(self.engine, **self.options)

    @property
    def name(self) -> str:
        """The label in reports: a model without an engine is "autograd", though records call it "backprop".

        A row that is called "dsf" in records is "dsf linspace", its default then.
        """
        if self._has_old_default:
            return f"{self.label} linspace"
        plain = self.engine == "backprop" and self.options.get("plain")
        return self.label.replace("backprop", "autograd", 1) if plain else self.label

    @property
    def recorded_options(self) -> Mapping[str, Any]:
        """The options in records: ``dsf`` without ``feedback`` meant "linspace" until 0.3 and has another id now."""
        if self._has_old_default:
            return {}
        return {"feedback": None, **self.options} if self.engine == "dsf" else self.options

    @property
    def _has_old_default(self) -> bool:
        return self.label == self.engine == "dsf" and self.options == {"feedback": "linspace"}

    @property
    def fact_columns(self) -> dict[str, Any]:
        """The facts' columns that identify the row: its name, its line in a chart, and its iterations k.

        Rows that differ only in k are on one line.
        """
        k, row = self.options.get("iterations"), self.name
        series = row if k is None else f"{self.label.replace(f' k={k}', '')} with k iterations"
        return {"row": row, "series": series, "k": k}


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One measurement, which runs in a separate process and results in a record.

    Attributes:
        kind: kind of measurement.
        alone: whether no other case may run in parallel, because this one is timed.
        device: the device.
        seed: seed of all random numbers.
    """

    kind: ClassVar[str]
    alone: ClassVar[bool] = True
    device: str
    seed: int

    @property
    @abstractmethod
    def topic(self) -> str:
        """Name of the task, model or layer that is run."""

    @property
    @abstractmethod
    def subject(self) -> str:
        """Name of what is measured on the topic: a row, for example."""

    def __str__(self) -> str:
        return f"{self.topic} {self.subject}"

    @abstractmethod
    def run(self) -> dict[str, Any]:
        """Measure; return the results, which can be converted to JSON."""

    def outcome(self, results: Mapping[str, Any]) -> str:
        """Return the results in a few words; empty if only the report can show them."""
        return ""

    @property
    def config(self) -> dict[str, Any]:
        """All settings that the results depend on, except the seed, as JSON; functions by name.

        The class of the case is not part of it, as :attr:`kind` identifies it.
        """
        config = _fields(self)
        del config["seed"]
        return recorded(config)

    @property
    def id(self) -> str:
        """Unique name of the case: readable, with a hash of :attr:`config` at the end."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.kind}/{self.topic}/{self.subject}/{self.device}/seed {self.seed}/{digest}"


def recorded(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in the form of records: JSON, with functions by name."""
    found: dict[str, Any] = json.loads(json.dumps(_plain(value), default=recorded_name))
    return found


def _plain(value: Any) -> Any:
    """Return ``value`` with dataclasses replaced by dicts."""
    if is_dataclass(value) and not isinstance(value, type):
        of_row = {}
        if isinstance(value, Row):
            of_row = {"options": _plain(value.recorded_options), **recorded_source(engine_class(value.engine))}
        return {**recorded_class(type(value)), **_fields(value), **of_row}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, without :data:`ADDED` fields at their default."""
    kept = [f for f in fields(value) if not (f.metadata == ADDED and getattr(value, f.name) == f.default)]
    return {f.name: _plain(getattr(value, f.name)) for f in kept}
