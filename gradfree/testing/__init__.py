"""A test suite for engines, also of other packages."""

# isort: off
# These modules register their features, in the order of the table.
import gradfree.testing.features.promises
import gradfree.testing.features.pass_features
import gradfree.testing.features.module_features  # noqa: F401
from gradfree.testing.conformance import EngineConformance
from gradfree.testing.features.feature import FEATURES, Feature
# isort: on

__all__ = ["FEATURES", "EngineConformance", "Feature"]
