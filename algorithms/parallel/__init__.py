"""Engines that solve chains in parallel, exactly or to a tolerance."""
