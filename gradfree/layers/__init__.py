"""Chains of single known layers, which an engine takes apart."""
