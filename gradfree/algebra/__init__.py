"""Arithmetic of cotangents, and the scans (linear recurrences) that propagate them."""
