"""Keeps an attached engine out of pickles of its model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch.utils.hooks import RemovableHandle

_REDUCE, _DEEPCOPY = "__reduce_ex__", "__deepcopy__"


class Unsaved:
    """Leaves some attributes or entries of ``owner`` out of its pickles; deep copies keep them, also unpickled.

    It sets ``__reduce_ex__`` and ``__deepcopy__`` on the instance, which ``pickle`` and ``copy.deepcopy`` use first.

    Args:
        owner: a module, or one of its dictionaries of hooks.
        keys: names of the module's attributes, or keys of the dictionary.
    """

    def __init__(self, owner: Any, keys: set[Any]):
        self._owner, self._keys = owner, keys
        self._put()

    def _put(self) -> None:
        vars(self._owner).update({_REDUCE: self._reduce, _DEEPCOPY: self._deepcopy})

    def remove(self) -> None:
        """Let pickles contain everything again."""
        for name in (_REDUCE, _DEEPCOPY):
            vars(self._owner).pop(name, None)

    def _reduce(self, protocol: Any) -> Any:
        kind: Any = type(self._owner)
        reduced = kind.__reduce_ex__(self._owner, protocol)
        make, arguments, state, values, items = (*reduced, None, None, None)[:5]
        if isinstance(state, dict):
            hidden = {_REDUCE, _DEEPCOPY} | self._keys
            state = {key: value for key, value in state.items() if key not in hidden} or None
        if items is not None:
            items = iter([item for item in items if item[0] not in self._keys])
        return make, arguments, state, values, items

    def _deepcopy(self, memo: dict[int, Any]) -> Any:
        self.remove()
        try:
            copied = copy.deepcopy(self._owner, memo)
        finally:
            self._put()
        Unsaved(copied, self._keys)
        return copied


def unsaved_hooks(handles: Iterable[RemovableHandle]) -> list[Unsaved]:
    """Leave the hooks of ``handles`` out of pickles of their modules."""
    owners: dict[int, tuple[Any, set[Any]]] = {}
    for handle in handles:
        for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            hooks = ref()
            owners.setdefault(id(hooks), (hooks, set()))[1].add(handle.id)
    return [Unsaved(hooks, ids) for hooks, ids in owners.values()]
