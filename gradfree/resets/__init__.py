"""Sequences whose state is reset in the middle, such as episodes."""
