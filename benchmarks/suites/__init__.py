"""The comparisons that have names."""
