"""Running cases: in worker processes on this machine, or on Ray."""
