"""What engines are made of: the interface, sweeps, layers taken apart, random feedback."""
