"""What is asked of every engine."""
