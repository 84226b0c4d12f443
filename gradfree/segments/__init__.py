"""Time chains in segments that run at once, repeated until their borders agree: multiple shooting."""
