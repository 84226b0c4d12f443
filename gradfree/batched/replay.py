"""Whether a module's forward pass can be run again, in a batch with others, and nobody notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from gradfree.batched.alike import likeness
from gradfree.batched.batch import Autocast, Bare
from gradfree.torchside.random_state import random_states_kept, torch_states_kept

_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def hindrance(module: nn.Module) -> str | None:
    """Return why ``module`` cannot be run again in a batch, as far as looking at it tells; ``None`` if nothing does.

    Hooks and a ``forward`` on ``module`` itself do not count: they belong to its caller.
    """
    seen: set[int] = set()
    for name, inner in module.named_modules():
        what = f"{name} ({type(inner).__name__})" if name else type(inner).__name__
        if why := _hindrance(inner):
            return f"{what} {why}"
        if inner is not module and "forward" in vars(inner):
            return f"{what} has a forward of its own, put on the instance"
        if inner is not module and (inner._forward_hooks or inner._forward_pre_hooks):
            return f"{what} has forward hooks, which would run again"
        for parameter in inner._parameters.values():
            if parameter is not None and id(parameter) in seen:
                return f"{what} shares a parameter with another layer of the same block"
            seen.add(id(parameter))
    return None


def keeps_tensors(module: nn.Module, x: Tensor, autocast: Autocast) -> bool:
    """Tell whether tensors from inside ``module`` outlive its forward pass, beside what it returns.

    A loss on them has a gradient only where the pass has a graph. Runs the module once, without one, for them to be
    seen; draws no random numbers.
    """
    device, dtype, enabled = autocast
    own = set(map(id, chain(module.parameters(), module.buffers())))
    seen = x.detach()
    with left_as_it_was(module):
        with (
            torch_states_kept([x.device]),
            torch.no_grad(),
            torch.autocast(device, dtype, enabled, cache_enabled=False),
            _Made() as made,
        ):
            Bare(module)(seen)
        made.references.append(ref(seen))
        del seen
        alive = [tensor for reference in made.references if (tensor := reference()) is not None]
        return any(id(tensor) not in own for tensor in alive)


@contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[list[str]]:
    """Give ``module`` back what it held; yield a list that then tells which attributes of it had changed.

    Python's and numpy's random numbers go on where they were, too, and are in that list if any were drawn.
    """
    before = {inner: dict(vars(inner)) for inner in module.modules()}
    dictionaries: list[dict[str, Any]] = [own for m in before for own in (m._parameters, m._buffers)]
    tensors = [(own, dict(own)) for own in dictionaries]
    held, changed = likeness(module), list[str]()
    with random_states_kept() as drawn:
        try:
            yield changed
        finally:
            changed += ["random numbers"] * drawn()
            changed += [name for own, kept in tensors for name in kept if own.get(name) is not kept[name]]
            for own, kept in tensors:
                own.update(kept)
            if likeness(module) != held:
                changed += [n for inner, own in before.items() for n in own if vars(inner).get(n) is not own[n]]
                changed += [""] * (not changed)
                for inner, own in before.items():
                    vars(inner).clear()
                    vars(inner).update(own)


class _Made(TorchFunctionMode):
    """Notes the tensors that torch's functions return."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[ref[Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returned = out if isinstance(out, tuple | list) else [out]
        self.references += [ref(tensor) for tensor in returned if isinstance(tensor, Tensor)]
        return out


def is_compiled(module: nn.Module) -> bool:
    """Tell whether the module's call is compiled."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _hindrance(module: nn.Module) -> str | None:
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
        return "draws a new mask each time it runs"
    if isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats:
        return "counts its batches"
    if isinstance(module, nn.RNNBase):
        return "is a recurrent layer, whose kernels run for one set of weights"
    if isinstance(module, _FAST_PATHS) and not module.training:
        return "takes another path without gradients, to other roundings"
    if is_compiled(module):
        return "is compiled"
    if parametrize.is_parametrized(module):
        return "computes its parameters"
    return None
