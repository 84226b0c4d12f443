"""Choosing how a gradient is computed while it trains: which way is the fastest, and which is good enough."""
