"""Which engine to take for a model of the user's own: contestants, a contest within a budget, and what to do then."""
