"""Convergence of sweeps to a tolerance: stopping rule, memory of failed passes, reported figures."""
