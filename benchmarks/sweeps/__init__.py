"""Comparisons put together from names, and searches."""
