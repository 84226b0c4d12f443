"""Choices during training: which engine is the fastest, and whether an engine's gradient is close enough."""
