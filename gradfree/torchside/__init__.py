"""Torch's own side of things: autograd's graph, hooks, sharded tensors, random states, optimizers."""
