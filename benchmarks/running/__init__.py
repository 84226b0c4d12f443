"""Running cases: here, in worker processes, on Ray."""
