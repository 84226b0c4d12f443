"""How well models train with each engine."""
