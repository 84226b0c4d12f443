"""Numbers of chains: cotangents, and the scans that carry them."""
