"""Trying an engine on a model and a batch without leaving a trace."""
