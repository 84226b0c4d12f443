"""Time and memory of training steps."""
