"""What steps cost in time and memory."""
