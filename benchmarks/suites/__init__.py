"""The named suites of comparisons."""
