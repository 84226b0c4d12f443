"""Engines that run recurrent layers in parallel over time, forward and backward."""
