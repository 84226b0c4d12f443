"""Tests for engines: a suite that other packages' engines can be put to, and the table of what works with which."""

# These register their features.
import gradfree.testing.features.changed_models
import gradfree.testing.features.everyday
import gradfree.testing.features.frameworks
import gradfree.testing.features.promises  # noqa: F401
from gradfree.testing.conformance import EngineConformance
from gradfree.testing.features.registry import FEATURES, Feature

__all__ = ["FEATURES", "EngineConformance", "Feature"]
