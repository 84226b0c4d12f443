"""Engines round other engines: they add to them, or choose among them."""
