"""Choosing among ways to the same gradient by what they take in training itself."""
