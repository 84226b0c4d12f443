"""Feedback weights: matrices that send errors back in place of transposed weights."""
