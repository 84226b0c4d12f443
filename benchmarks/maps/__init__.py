"""Engines' cost and accuracy over the sizes of a net."""
