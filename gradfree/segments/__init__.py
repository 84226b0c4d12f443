"""Time chains in segments, all of them at once, until their borders fit: multiple shooting."""
