"""What is trained: data, a model, a loss and a score."""
