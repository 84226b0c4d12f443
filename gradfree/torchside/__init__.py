"""Helpers around torch: autograd's graph, hooks, sharded tensors, random states, optimizers."""
