"""Chains in depth whose runs of blocks lie on the ranks of a process group, one run on each."""
