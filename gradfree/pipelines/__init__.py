"""Layers on ranks whose training goes forward only: a pipeline without a backward phase."""
