"""Many modules at once: which are alike, whether they can be run again, and one graph for all of them."""
