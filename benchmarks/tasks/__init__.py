"""Tasks: data, a model, a loss and a score."""
