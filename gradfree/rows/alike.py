"""Checks before a pass whether blocks can be a row: equal structure, known layers, a forward that can be traced."""

from __future__ import annotations

import gc
import operator
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from gradfree.errors import ChainError
from gradfree.rows.settings import Settings
from gradfree.torchside.private import is_compiled, saves_elsewhere, version
from gradfree.torchside.sharding import own_class
from gradfree.torchside.structure import MODULE_ATTRIBUTES, structure_of, tensors_of
from gradfree.torchside.tracing import ThreadTracer

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, type)

_LAYERS = {
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Identity, nn.Flatten),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.GELU, nn.ReLU, nn.Tanh, nn.SiLU, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Mish, nn.Hardswish),
    *(nn.ReLU6, nn.SELU, nn.CELU, nn.Softsign, nn.LogSigmoid, nn.Softmax),
}
"""Layers that torch can run as a batch under ``vmap``, with different parameters for each."""

_FUNCTIONS = {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.matmul, operator.getitem),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.tanh, torch.sigmoid, torch.relu, torch.matmul, torch.cat),
    *(torch.chunk, torch.split, torch.softmax, torch.flatten, torch.sin, torch.cos, torch.exp),
    *(F.linear, F.layer_norm, F.group_norm, F.relu, F.gelu, F.silu, F.tanh, F.sigmoid, F.softmax, F.elu),
    *(F.leaky_relu, F.softplus, F.mish, F.conv1d, F.conv2d, F.conv3d),
}
_METHODS = {
    *("add", "sub", "mul", "div", "neg", "tanh", "sigmoid", "relu", "sin", "cos", "exp", "matmul", "softmax"),
    *("chunk", "split", "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "flatten", "unflatten"),
    "contiguous",
}


def signature(module: nn.Module) -> Hashable:
    """Return a value that is equal for two modules that differ only in the numbers in their parameters and buffers.

    It contains classes, shapes, trained parameters, modes and plain attributes. Any other attribute, such as a tensor
    or a function, must be the same object.
    """
    return tuple(
        (name, own_class(inner), inner.training, _attributes(inner), _tensors(inner))
        for name, inner in module.named_modules(remove_duplicate=False)
    )


def why_no_row(blocks: Sequence[nn.Module], declared: bool) -> str | None:
    """Return why ``blocks`` cannot be a row, as far as that shows without running them; ``None`` if they can.

    Args:
        blocks: run one after the other.
        declared: whether the user has set ``batched=True``: then a forward that cannot be traced is accepted.
    """
    if len(blocks) < 2 or len({signature(block) for block in blocks}) > 1:
        return "the blocks are not equal in structure, attributes, modes and shapes"
    for block in blocks:
        for inner in block.modules():
            if reason := _why_not_batchable(inner):
                return f"{type(inner).__name__} {reason}"
        tensors = tensors_of(block).values()
        if len(tensors) > len(set(map(id, tensors))):
            return "two layers of a block share a parameter or buffer"
    return _why_not_traceable(blocks[0], declared)


def first_line(error: Exception) -> str:
    """Return the first line of an error, to quote it."""
    return (str(error) or repr(error)).splitlines()[0]


def _why_not_batchable(module: nn.Module) -> str | None:
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
        return "draws a new mask each time it runs"
    if isinstance(module, nn.modules.batchnorm._NormBase) and (module.training or module.running_mean is None):
        return "uses the statistics of its batch"
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention | nn.TransformerEncoderLayer):
        return "uses a kernel for one set of weights"
    if getattr(module, "inplace", False):
        return "works in place"
    if is_compiled(module):
        return "is compiled"
    if hasattr(module, "parametrizations"):
        return "computes its parameters"
    if "register_hook" in getattr(getattr(type(module).forward, "__code__", None), "co_names", ()):
        return "calls register_hook"
    if any(p is not None and p.dim() > 3 and not p.is_contiguous() for p in module._parameters.values()):
        return "has weights in channels-last layout"
    if any(isinstance(value, Tensor) for value in vars(module).values()):
        return "holds a tensor that is no parameter or buffer"
    return None


def _why_not_traceable(block: nn.Module, declared: bool) -> str | None:
    """Return why the block's forward cannot be traced, if so.

    Raises:
        ChainError: the forward keeps what tracing has made outside of the block.
    """
    proxies: list[Any] = []
    reason = _trace_problem(block, declared, proxies)
    if _any_alive(proxies):
        raise ChainError(
            f"the forward of {type(block).__name__} stores tensors outside of the block. It has stored symbolic "
            "tensors there while an engine checked whether such blocks can run in a batch. Attach with batched=False."
        )
    return reason


def _any_alive(proxies: Sequence[Any]) -> bool:
    """Return whether one of the tensors still exists, not only in a cycle (fx keeps those of parameters in one)."""
    if all(proxy() is None for proxy in proxies):
        return False
    gc.collect()
    return any(proxy() is not None for proxy in proxies)


def _trace_problem(block: nn.Module, declared: bool, proxies: list[Any]) -> str | None:
    """Trace a copy of ``block`` and return why it cannot run in a batch; append the symbolic tensors to ``proxies``."""
    try:
        # Inside an nn.Sequential, a block gets only its state, as in the chain.
        tracer, structure = _Tracer(proxies), nn.Sequential(structure_of(block, own_settings=True))
    except Exception as error:  # The copy of a user's attribute may raise anything.
        return f"it cannot be copied ({first_line(error)})"
    settings = Settings(structure.modules())
    buffers = [(buffer, version(buffer)) for buffer in structure.buffers()]
    try:
        graph = tracer.trace(structure)
    except Exception as error:  # The user's forward may raise anything for symbolic tensors.
        if declared or tracer.reason:
            return tracer.reason
        return f"its forward cannot be traced ({first_line(error)})"
    if tracer.reason:
        return tracer.reason
    # In a row, a tensor that the block stores for a loss would have no gradient.
    if settings.changed() or _any_alive(proxies):
        return "it stores tensors or counts from inside: a loss on such a tensor would have no gradient"
    if not settings.watched:
        return "its attributes hold objects of too many parts, whose changes would not be noticed"
    if any(version(buffer) != number for buffer, number in buffers):
        return "it changes its buffers"
    for node in graph.nodes:
        if node.op == "call_method" and node.target.endswith("_"):
            return f"its forward calls {node.target}"
        if node.kwargs.get("inplace"):
            return "it works in place"
        if not declared and not _is_known(node, structure):
            what = getattr(node.target, "__name__", node.target)
            return f"its forward uses {what}, which is not known to run in a batch"
    return None


def _is_known(node: fx.Node, structure: nn.Module) -> bool:
    if node.op == "call_module":
        return type(structure.get_submodule(str(node.target))) in _LAYERS
    if node.op in ("call_function", "call_method"):
        return node.target in (_FUNCTIONS if node.op == "call_function" else _METHODS)
    return node.op != "get_attr" or node.target in tensors_of(structure)


class _Tracer(ThreadTracer):
    """Stores weak references to its symbolic tensors in ``proxies``, and in ``reason`` why hooks would be lost."""

    # Operations on buffers, on the meta device, would run torch's Python code and import the compiler in the trace.
    proxy_buffer_attributes = True

    def __init__(self, proxies: list[Any]):
        super().__init__()
        self.proxies = proxies
        self.reason: str | None = None

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Proxy:
        if saves_elsewhere():
            self.reason = "it has a checkpoint, or other hooks on what autograd saves"
        proxy = super().create_proxy(kind, target, *args, **kwargs)
        self.proxies.append(ref(proxy))
        return proxy


def _attributes(module: nn.Module) -> Hashable:
    return tuple((name, _value(value)) for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES)


def _value(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        # With its type: 1, 1.0 and True are equal in Python.
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), *map(_value, value)
    if isinstance(value, dict):
        return dict, *((_value(k), _value(v)) for k, v in value.items())
    return id(value)


def _tensors(module: nn.Module) -> Hashable:
    return tuple(
        (name, None if t is None else (type(t), t.shape, t.dtype, t.device, t.requires_grad))
        for named in (module._parameters, module._buffers)
        for name, t in named.items()
    )
