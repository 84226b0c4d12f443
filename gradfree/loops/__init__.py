"""Recurrences step by step: the plain loop, and chunks of steps that are compiled as one function."""
