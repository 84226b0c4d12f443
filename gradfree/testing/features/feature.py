"""What is asked of engines, one function each: it returns if the feature is right, and raises otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradfree.engines.engine import Engine
from gradfree.errors import ChainError
from gradfree.testing.cases.cases import CASES, FAMILIES, STANDING_FOR, ModelCase, isolated

Check = Callable[[Engine, ModelCase], None]


@dataclass(frozen=True)
class Feature:
    """Something that people do with a model.

    Attributes:
        name: in a few words.
        check: does it with an engine and a case, and compares with the same engine without it.
        families: of the cases that it can be done with at all.
        everywhere: whether it is to be tried on every case, not just on the one that stands for its family.
        slow: whether it takes a second or more.
        repeats: whether it compares several passes, which engines that draw anew in each do not keep to.
    """

    name: str
    check: Check
    families: Sequence[str] = FAMILIES
    everywhere: bool = False
    slow: bool = False
    repeats: bool = False

    @property
    def cases(self) -> list[ModelCase]:
        """The cases to try it on."""
        found = CASES if self.everywhere else STANDING_FOR.values()
        return [case for case in found if case.family in self.families]

    def refusal(self, engine: Engine, case: ModelCase) -> str | None:
        """Return ``None`` if the feature works with ``engine``, else the message by which the engine refuses it.

        Raises:
            Exception: it neither works nor is refused: a wrong result (an ``AssertionError``), or an error that is
                not the library's own.
        """
        if self.repeats and engine.is_random:
            return "the engine draws random numbers in each pass, so that no two passes have the same gradients."
        try:
            with isolated():
                self.check(engine, case)
        except ChainError as error:
            if error.__cause__ is not None:
                raise  # Another error, with a note of where it happened.
            return str(error)
        return None


FEATURES: dict[str, Feature] = {}
"""All features by name."""


def feature(name: str, **options: Any) -> Callable[[Check], Check]:
    """Register the decorated function as the feature ``name``, with the options of :class:`Feature`."""

    def register(check: Check) -> Check:
        FEATURES[name] = Feature(name, check, **options)
        return check

    return register
