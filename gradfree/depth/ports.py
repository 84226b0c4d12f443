"""Ports: which argument of a block is the state, and which part of its output is the next state."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""


class Port:
    """Finds the state among the arguments and outputs of most blocks; see :func:`register_port` for other blocks.

    The state is the first argument of the block's ``forward``, by position or by keyword. The block returns the next
    state itself, or as the first entry that is not ``None`` of a tuple, list, named tuple, dictionary or dataclass. The
    model gets the other entries, too, and a loss may use them.

    A port stores nothing about a call, and is copied with the model.

    Args:
        block: the block.
    """

    state: str | None = None
    """The name of the argument that is the state, if it is not the first."""

    def __init__(self, block: nn.Module):
        names = _arguments(block)
        self.name = self.state or next(iter(names), None)
        self.position = names.index(self.name) if self.name in names else 0

    def take(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor | None, Sequence[Tensor], Callable[[Tensor, Sequence[Tensor]], Arguments]]:
        """Return the state, ``None`` if there is none; the other tensors that need a gradient; and a function.

        The function takes a new state and new other tensors, and returns the arguments with these in place.
        """
        if len(args) == 1 and not kwargs and self.position == 0:
            state = args[0]  # A short path for most blocks.
            return state if isinstance(state, Tensor) else None, (), _alone
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        key = next((k for k in (self.position, self.name) if k in given), next(iter(given), None))
        others = {k: v for k, v in given.items() if k != key and _is_fixed(v)}
        live = {id(t): t for t in tensors_in(others) if t.requires_grad}

        def put(state: Tensor, inputs: Sequence[Tensor]) -> Arguments:
            new = given | replaced(others, dict(zip(live, inputs, strict=True))) | {key: state}
            return tuple(new[n] for n in range(len(args))), {name: new[name] for name in kwargs}

        state = given.get(key)
        return state if isinstance(state, Tensor) else None, list(live.values()), put

    def split(self, out: Any) -> tuple[Tensor | None, Any]:
        """Return the next state, ``None`` if ``out`` has none, and the rest, for :meth:`join`."""
        if isinstance(out, Tensor):
            return out, None
        key, state = next(((k, v) for k, v in _entries(out) if v is not None), (None, None))
        return state if isinstance(state, Tensor) else None, (out, key)

    def join(self, state: Tensor, rest: Any) -> Any:
        """Return a copy of the output that was split, with ``state`` in it."""
        if rest is None:
            return state
        before, key = rest
        return _with_entry(before, key, state)


_ports: dict[type[nn.Module], type[Port]] = {nn.Module: Port}


def register_port(block: type[nn.Module], port: type[Port]) -> None:
    """Use ``port`` from now on for blocks of a class and its subclasses.

    For example for blocks that are called with the mask first and return (weights, state)::

        class MaskFirst(Port):
            state = "x"  # forward(self, mask, x)

            def split(self, out):
                return out[1], out[0]

            def join(self, state, rest):
                return rest, state


        register_port(MyBlock, MaskFirst)

    The engine cuts the graph at the state. Other tensors with a gradient must be inputs, the same for every block; a
    tensor that one block passes to the next beside the state starts a new pass or raises.

    Args:
        block: the class of the blocks.
        port: its class; an instance is made for each block when an engine is attached.
    """
    _ports[block] = port


def port_of(block: nn.Module) -> Port:
    """Return the port of ``block``: that of its class or of the nearest base class."""
    return next(_ports[kind] for kind in type(block).__mro__ if kind in _ports)(block)


def _alone(state: Tensor, _: Sequence[Tensor]) -> Arguments:
    return (state,), {}


def _arguments(block: nn.Module) -> list[str]:
    """Return the names of the arguments of the block's ``forward``; none if it has no signature."""
    try:
        parameters = inspect.signature(block.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _is_fixed(given: Any) -> bool:
    """Return whether a block cannot change ``given``, but for its tensors: plain and named tuples hold them."""
    if isinstance(given, tuple):
        return not getattr(given, "__dict__", None) and all(map(_is_fixed, given))
    return not (isinstance(given, list | MutableMapping) or dataclasses.is_dataclass(given))


def _entries(out: Any) -> Iterable[tuple[Any, Any]]:
    """Return the entries of a container by key; none if ``out`` is no known kind of container."""
    if isinstance(out, MutableMapping):
        return out.items()
    if isinstance(out, list) or type(out) is tuple or _is_named(out):
        return enumerate(out)
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        return ((f.name, getattr(out, f.name)) for f in dataclasses.fields(out))
    return ()


def _with_entry(out: Any, key: Any, value: Any) -> Any:
    """Return a copy of a container with ``value`` at ``key``."""
    if isinstance(out, tuple):
        entries = (*out[:key], value, *out[key + 1 :])
        return out._make(entries) if _is_named(out) else entries  # type: ignore[attr-defined]
    copied = copy.copy(out)
    if isinstance(out, list | MutableMapping):
        copied[key] = value
    else:
        object.__setattr__(copied, key, value)  # Works for frozen dataclasses, and does not run __post_init__ again.
    return copied


def tensors_in(out: Any) -> list[Tensor]:
    """Return the tensors in ``out``, each once, also those inside known containers."""
    if isinstance(out, Tensor):
        return [out]
    found = [tensor for _, entry in _entries(out) for tensor in tensors_in(entry)]
    return list({id(tensor): tensor for tensor in found}.values())


def replaced(out: Any, new: Mapping[int, Tensor]) -> Any:
    """Return ``out`` with tensors replaced by those of ``new``, by id; parts without a replacement are not copied."""
    if isinstance(out, Tensor):
        return new.get(id(out), out)
    for key, entry in list(_entries(out)):
        other = replaced(entry, new)
        if other is not entry:
            out = _with_entry(out, key, other)
    return out


def _is_named(out: Any) -> bool:
    return isinstance(out, tuple) and hasattr(out, "_make")
