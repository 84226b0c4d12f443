"""Chains in time: one cell applied at every step of a sequence."""
