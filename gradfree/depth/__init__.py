"""Chains in depth: blocks one after the other."""
