"""Hypothesis with the same examples in each run, as many as they take."""

from hypothesis import HealthCheck, settings

FIXED = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
