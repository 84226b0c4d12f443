"""Training runs: how well models train with each engine."""
