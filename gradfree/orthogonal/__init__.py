"""Weights that stay orthogonal during training."""
