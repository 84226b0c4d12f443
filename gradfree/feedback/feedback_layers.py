"""Linear layers and convolutions anywhere in a model, whose input gradients use feedback weights B in place of W."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.parameter import is_lazy

from gradfree.chains.kinds import known_kinds
from gradfree.chains.refusals import problems_of_attached
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.errors import ChainError
from gradfree.layers.roles import contains_dropout, weight_of
from gradfree.torchside.guards import refuse_batched, refuse_second_derivatives, refuse_transforms, saved
from gradfree.torchside.private import Function, uncompiled
from gradfree.torchside.sharding import is_dtensor
from gradfree.torchside.unsaved import Unsaved

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


class FeedbackLayers(Site):
    """All linear layers and convolutions in a module that run torch's ``forward``."""

    is_chain = False
    several = True
    looks_like = "a model with an nn.Linear or a convolution in it"

    def __init__(self, path: str, module: nn.Module):
        super().__init__(path, module)
        everything = {path: module, **self.inside}
        uncalled = [m.out_proj for m in everything.values() if isinstance(m, nn.MultiheadAttention)]
        called = {where: inner for where, inner in everything.items() if inner not in uncalled}
        self.blocks = {where: inner for where, inner in called.items() if _replaceable(inner)}
        self.exact = {
            where: type(m).__name__ for where, m in called.items() if where not in self.blocks and _has_matrix(m)
        }
        """The classes of other modules with matrices, which keep their exact gradients, by path."""
        self._layers: dict[str, _Layer] = {}

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Return whether ``module`` contains such a layer."""
        return any(map(_replaceable, module.modules()))

    @classmethod
    def attachment_on(cls, module: nn.Module) -> Attachment | None:
        """Return the attachment that is on the layer ``module``; ``None`` if there is none."""
        layer = getattr(vars(module).get("forward"), "__self__", None)
        return layer.attachment if isinstance(layer, _Layer) else None

    def problems(self) -> Iterator[str]:
        """Yield why no engine can be attached: another engine on a layer, or uninitialised weights."""
        kinds: list[type[Site]] = [FeedbackLayers, *known_kinds()]
        taken = [problem for path, layer in self.blocks.items() for problem in problems_of_attached(path, layer, kinds)]
        yield from taken[:1]  # The remedy is the same for all.
        for path, layer in self.blocks.items():
            if any(map(is_lazy, layer.parameters())):
                yield f"{path} has uninitialised lazy parameters: run the model once, then attach."

    def record(self, attachment: Attachment) -> Sequence[Removable]:
        """Replace the forward of each layer."""
        self._layers = {path: _Layer(attachment, path, layer) for path, layer in self.blocks.items()}
        return [*self._layers.values(), *(Unsaved(layer, {"forward"}) for layer in self.blocks.values())]

    def feedback_weights(self) -> dict[str, Tensor]:
        """Return the current B of each layer, shaped like its weight, by module path; nothing before attaching."""
        with torch.no_grad():
            return {path: layer.weight() for path, layer in self._layers.items()}

    def __str__(self) -> str:
        return f"{len(self.blocks)} layers with feedback weights"


def _replaceable(module: nn.Module) -> bool:
    kind = next((kind for kind in _LAYERS if isinstance(module, kind)), None)
    if kind is None or contains_dropout(module):
        return False
    if "forward" in vars(module) and FeedbackLayers.attachment_on(module) is None:
        return False
    methods = ((getattr(k, "forward", None), getattr(k, "_conv_forward", None)) for k in (type(module), kind))
    return next(methods) == next(methods) and all(p.is_floating_point() for p in module.parameters())


def _has_matrix(module: nn.Module) -> bool:
    matrices = any(p is not None and not is_lazy(p) and p.dim() > 1 for p in module._parameters.values())
    return matrices and not isinstance(module, nn.Embedding | nn.EmbeddingBag)


class _Layer:
    """Replaces a layer's ``forward``: runs the layer on its detached input, and sends the error back through B.

    So the layer's graph computes the gradients of weight and bias only, also if these are computed themselves.
    """

    def __init__(self, attachment: Attachment, path: str, layer: nn.Module):
        self.attachment, self._path, self._layer = attachment, path, layer
        vars(layer)["forward"] = self.forward

    def remove(self) -> None:
        """Restore the layer's ``forward``."""
        del self._layer.forward

    @uncompiled
    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output, bitwise equal; takes the layer's arguments."""
        run: Any = type(self._layer).forward
        if not (torch.is_grad_enabled() and isinstance(input, Tensor)):
            return run(self._layer, input, *args, **kwargs)
        attachment, path = self.attachment, self._path
        attachment.solved.add(path)
        if not input.requires_grad:
            return run(self._layer, input, *args, **kwargs)
        refuse_transforms(path)
        # Read before the layer runs: a forward pass may change a computed weight, by a power iteration.
        weight = weight_of(self._layer)
        out = run(self._layer, input.detach(), *args, **kwargs)
        return _FeedbackFunction.apply(self._feedback(), input, weight, out)

    def weight(self) -> Tensor:
        """Return B for the layer's current weight."""
        return self._feedback().weight(weight_of(self._layer))

    def _feedback(self) -> _Feedback:
        # Anew in each pass: programs change the stride or the dilation of a convolution.
        return _Feedback(self.attachment, self._path, *_backward_of(self._layer))


class _Feedback(NamedTuple):
    """What autograd's graph stores of a layer. Not the layer itself, which may store its output: a reference cycle.

    Attributes:
        attachment: of the engine.
        path: of the layer.
        back: (cotangent of the layer's output, weight, shape of its input) -> cotangent of the input.
        fan_in: the number of inputs that each output sums, on average.
    """

    attachment: Attachment
    path: str
    back: Callable[[Tensor, Tensor, torch.Size], Tensor]
    fan_in: float

    def weight(self, forward_weight: Tensor) -> Tensor:
        """Return B for the layer's weight ``forward_weight``."""
        if self.attachment.use_exact:
            return forward_weight
        if is_dtensor(forward_weight):
            raise ChainError(f"the weight of {self.path} is spread over ranks in the backward pass. Use DDP.")
        # A WeightFeedbackEngine: no other one takes such sites.
        engine: Any = self.attachment.engine
        found: Tensor = engine.feedback_weight(self.attachment.memory, self.path, forward_weight, self.fan_in)
        return found


class _Context(FunctionCtx):
    feedback: _Feedback
    shape: torch.Size


class _FeedbackFunction(Function):
    """(feedback, input of the layer, its weight without history, its output) -> its output."""

    @staticmethod
    def forward(ctx: _Context, feedback: _Feedback, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """Detach the output; the result shares memory and version counter with it."""
        ctx.save_for_backward(weight)
        ctx.feedback, ctx.shape = feedback, x.shape
        return out.detach()

    @staticmethod
    def backward(ctx: _Context, cotangent: Tensor) -> tuple[None, Tensor, None, Tensor]:
        """Send the cotangent through B to the input, and unchanged to the layer's graph."""
        refuse_second_derivatives()
        refuse_batched([cotangent], ctx.feedback.path)
        if (deltas := ctx.feedback.attachment.deltas) is not None:
            deltas[ctx.feedback.path] = cotangent.detach()
        (weight,) = saved(ctx, ctx.feedback.path)
        weight = ctx.feedback.weight(weight).to(cotangent.dtype)
        return None, ctx.feedback.back(cotangent, weight, ctx.shape), None, cotangent


def _backward_of(layer: nn.Module) -> tuple[Callable[[Tensor, Tensor, torch.Size], Tensor], float]:
    """Return the backward function of ``layer`` for its input, and how many inputs each output sums."""
    if isinstance(layer, nn.Linear):
        return _through_linear, layer.in_features
    assert isinstance(layer, _LAYERS[1:])
    transposed = isinstance(layer, _TRANSPOSED)
    pad: Callable[[Tensor], Tensor] | None = None
    padding = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        mode = layer.padding_mode if layer.padding_mode != "zeros" else "constant"
        pad, padding = partial(F.pad, pad=layer._reversed_padding_repeated_twice, mode=mode), (0,) * len(layer.stride)
    settings = layer.stride, padding, layer.dilation, transposed, layer.groups
    fan_in = layer.in_channels / layer.groups * prod(layer.kernel_size)
    return partial(_through_convolution, settings, pad), fan_in / (prod(layer.stride) if transposed else 1)


def _through_linear(cotangent: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    return cotangent @ weight


def _through_convolution(
    settings: tuple[Any, ...],
    pad: Callable[[Tensor], Tensor] | None,
    cotangent: Tensor,
    weight: Tensor,
    shape: torch.Size,
) -> Tensor:
    if pad is not None:
        with torch.enable_grad():
            x = cotangent.new_empty(shape).requires_grad_()
            padded = pad(x)
        inner = _through_convolution(settings, None, cotangent, weight, padded.shape)
        return torch.autograd.grad(padded, x, inner)[0]
    if cotangent.dim() < weight.dim():
        one = _through_convolution(settings, None, cotangent[None], weight, torch.Size((1, *shape)))
        return one[0]
    stride, padding, dilation, transposed, groups = settings
    more = [0] * len(stride)
    if transposed:
        # The part of the output's size that output_padding or output_size has added.
        sizes = zip(cotangent.shape[2:], shape[2:], stride, padding, dilation, weight.shape[2:], strict=True)
        more = [out - ((n - 1) * s - 2 * p + d * (k - 1) + 1) for out, n, s, p, d, k in sizes]
    # Only its shape is read. An expanded scalar would not save memory: torch would copy it.
    like = cotangent.new_empty(shape)
    found: Tensor = torch.ops.aten.convolution_backward(
        cotangent, like, weight, None, stride, padding, dilation, transposed, more, groups, (True, False, False)
    )[0]
    return found
