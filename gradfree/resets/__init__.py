"""Sequences that begin anew in the middle, such as episodes."""
