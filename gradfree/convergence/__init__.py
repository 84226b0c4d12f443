"""Sweeps until a tolerance: when they have settled, when to give up, what is remembered and reported of it."""
