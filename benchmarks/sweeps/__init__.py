"""Comparisons of every combination of named engines, tasks and settings."""
