"""Newton's method on a chain in time: all steps at once, until nothing changes (DEER, ParaRNN)."""
