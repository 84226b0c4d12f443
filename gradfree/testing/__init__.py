"""Tests for engines: a suite that other packages' engines can be put to, and the table of what works with which."""

# These register their features.
import gradfree.testing.features
import gradfree.testing.frameworks
import gradfree.testing.promises  # noqa: F401
from gradfree.testing.conformance import EngineConformance
from gradfree.testing.registry import FEATURES, Feature

__all__ = ["FEATURES", "EngineConformance", "Feature"]
