"""Engines compared in speed, memory and accuracy: ``gradfree bench``."""
