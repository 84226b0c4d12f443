"""Dry runs: an engine on a model and a batch, with everything restored afterwards."""
