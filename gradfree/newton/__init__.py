"""Newton's method on a chain in time: sweeps over all steps at once until convergence (DEER, ParaRNN)."""
