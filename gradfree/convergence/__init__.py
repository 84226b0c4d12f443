"""Sweeps until a tolerance: when they have settled, when to give up, and what of it is remembered and told."""
