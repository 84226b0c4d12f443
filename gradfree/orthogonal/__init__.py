"""Weights that are kept orthogonal while they train."""
