"""Chains in depth across the ranks of a process group: each rank holds one run of consecutive blocks."""
