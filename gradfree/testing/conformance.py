"""The tests that every engine passes, as a class to derive from in pytest."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gradfree.engines.engine import Engine
from gradfree.testing.cases.cases import CASES, ModelCase, Specimen
from gradfree.testing.features.feature import FEATURES, Feature
from gradfree.testing.features.promises import require

BASIC = FEATURES["forward and backward pass"]


class EngineConformance:
    """Derive a ``Test...`` class with your engines in it, and run pytest.

    On every chain that it accepts, an engine must support each feature or raise :class:`~gradfree.ChainError`. A
    refused feature is shown as skipped, with the message: ``pytest -rs``.

    Attributes:
        engines: the engines to test, with their options.
        features: the features to test; by default all. ``[f for f in FEATURES.values() if not f.slow]`` leaves out
            those that compile, which take half of the time.
        device: of models and batches; an option ``--device`` of your conftest.py comes first.
    """

    engines: Sequence[Engine] = ()
    features: Sequence[Feature] = tuple(FEATURES.values())
    device: str = "cpu"

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize every test by engine, and every feature by the chains that the engine accepts."""
        if "feature" in metafunc.fixturenames:
            device = metafunc.config.getoption("device", self.device)
            cells = list(self.cells(device))
            ids = [f"{engine}-{case.name}-{feature.name}" for engine, case, feature in cells]
            metafunc.parametrize(("engine", "case", "feature"), cells, ids=ids)
        elif "engine" in metafunc.fixturenames:
            metafunc.parametrize("engine", self.engines, ids=str)

    def cells(self, device: str) -> Iterator[tuple[Engine, ModelCase, Feature]]:
        """Yield every feature for every engine and every chain that it accepts."""
        models = {case: Specimen(case).model for case in CASES}
        for engine in self.engines:
            for case, model in models.items():
                if engine.validate(model, [case.chain]).ok:
                    there = replace(case, device=device)
                    yield from ((engine, there, feature) for feature in self.features if case in feature.cases)

    def test_engines_are_values(self, engine: Engine) -> None:
        """Engines with equal options are equal; engines can be pickled, print their options and are immutable."""
        same: Any = pickle.loads(pickle.dumps(engine))
        require(same == engine == copy.deepcopy(engine), "a copy is not equal to the engine")
        require(hash(same) == hash(engine), "equal engines have different hashes")
        require(repr(engine).startswith(type(engine).__name__ + "("), f"repr() does not name the class: {engine!r}")
        with suppress(AttributeError):
            engine.no_such_option = 1  # type: ignore[attr-defined]
        require(not hasattr(engine, "no_such_option"), "the engine can be changed: make it a frozen dataclass")

    def test_some_chain_is_taken(self, engine: Engine) -> None:
        """An engine that refuses every chain fails."""
        assert any(BASIC.refusal(engine, case) is None for case in CASES)

    def test_a_feature_works_or_is_refused(self, engine: Engine, case: ModelCase, feature: Feature) -> None:
        """A wrong result, or an error other than ``ChainError``, is a failure."""
        refusal = feature.refusal(engine, case)
        if refusal is not None:
            import pytest

            pytest.skip(f"refused: {refusal}")
