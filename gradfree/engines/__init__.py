"""Base classes of engines: the interface, sweeps, engines for single layers, random feedback."""
