"""Chains in time of cells that a model calls in a loop of its own."""
