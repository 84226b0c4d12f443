"""Functions with a backward pass of their own, as steps of spiking networks call them."""

import torch


class OldSpike(torch.autograd.Function):
    """A surrogate gradient in the form that vmap has no rule for."""

    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx, g):
        (u,) = ctx.saved_tensors
        return g / (1 + (3 * u).abs()) ** 2


class Spike(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(u):
        return (u > 0).to(u.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    backward = OldSpike.backward


class Scale(torch.autograd.Function):
    """Takes a weight that no TorchFunctionMode sees."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h, w):
        return h * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        h, w = ctx.saved_tensors
        return g * w, g * h
