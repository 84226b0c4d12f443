"""What the commands of ``gradfree bench`` do."""
