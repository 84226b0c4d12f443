"""The interface of chains for engines, places of chains in models, and attached engines."""
