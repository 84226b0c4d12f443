"""Weights around the chain that the other end of the ranks uses: a tied embedding, a head registered before the blocks.

Each weight lies on one rank. What the first training pass shows to be used at the other end is sent to it pass by pass,
and its gradient comes back; until then all of them are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from gradfree.algebra.cotangents import Cotangent
from gradfree.errors import ChainError
from gradfree.ranks.crossings import ARRIVED, Arrived, Sent, anchor
from gradfree.ranks.messages import SHARED, Messages, Neighbours
from gradfree.ranks.placement import Placement
from gradfree.torchside.graph import walk
from gradfree.torchside.private import version
from gradfree.torchside.sharding import is_spread, whole

Places = Sequence[tuple[nn.Module, str]]
"""The modules that have a weight, with their names for it."""


class SharedWeights(Neighbours):
    """What the first and the last rank send each other; nothing on the ranks between them.

    Args:
        model: with all its weights.
        placement: what lies where; buffers that change at the other end are moved there.
        messages: the ranks.
    """

    def __init__(self, model: nn.Module, placement: Placement, messages: Messages):
        super().__init__(messages, next(model.parameters()).device)
        self._home, self._other = placement.home, self.count - 1 - self.position
        is_end = self._other != self.position and 0 in (self.position, self._other)
        around = {n: own for n, own in _places(model, placement).items() if is_end and not placement.in_blocks(n)}
        self._owned = {name: own for name, own in around.items() if self._home[name] == self.position}
        self._remote = {name: own for name, own in around.items() if name not in self._owned}
        buffers = [name for name, _ in model.named_buffers() if is_end and not placement.in_blocks(name)]
        self._model, self._buffers = model, [name for name in buffers if self._home[name] == self._other]
        self._before: dict[str, tuple[int, int]] = {}
        self._used: set[str] | None = set() if is_end else None
        self._names: Sequence[str] = ()
        self._node: object = None

    @contextmanager
    def in_place(self, number: int, device: torch.device) -> Iterator[list[Tensor]]:
        """Have the other end's weights in place; yield what backward passes must come by, so that gradients are sent.

        Args:
            number: of the pass.
            device: where they go.
        """
        self.number, self.device = number, device
        reached: list[Tensor] = []
        if self.position == 0:
            reached += self._send_weights()
        placeholders = {name: getattr(*places[0]) for name, places in self._remote.items()}
        if self._remote:
            values, trained = self.take(self._other, SHARED, f"the values of {_list(self._remote)}")
            reached += self._receive_weights(values, trained)
        if self.position > 0:
            reached += self._send_weights()
        try:
            yield reached
        finally:
            for name, tensor in placeholders.items():
                _put(self._remote[name], tensor)

    def watch(self) -> None:
        """Note what buffers are, before the part of the model that runs at this end."""
        self._before = self._versions()

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note what ``tensors``, which this end's part of the model has come to, have used and changed."""
        if self._used is None or not torch.is_grad_enabled():
            return
        stops = walk((t for t in tensors if t.requires_grad), ends=(ARRIVED,)).stops
        self._used |= {self._names[number] for node, number in stops if node is self._node}
        # Normalization layers count the changes of one of their buffers only.
        changed = {_owner(name) for name, now in self._versions().items() if now != self._before.get(name, now)}
        self._used |= {name for name in self._buffers if _owner(name) in changed}

    def exchange_uses(self) -> bool:
        """Exchange what the first training pass has shown, behind it: from then on nothing else is sent.

        Returns:
            Whether this was that pass.

        Raises:
            ChainError: the other end uses a weight that FSDP has sharded by itself.
        """
        if self._used is None or not torch.is_grad_enabled():
            return False
        what = "what the first training pass has used"
        self.give([], self._other, SHARED, what, self._used)
        _, its = self.take(self._other, SHARED, what)
        self._home |= dict.fromkeys(self._used & set(self._buffers), self.position)
        self._home |= dict.fromkeys(its - self._owned.keys(), self._other)
        self._remote = {name: places for name, places in self._remote.items() if name in self._used}
        self._owned = {name: places for name, places in self._owned.items() if name in its}
        self._used = self._node = None
        for name, places in self._owned.items():
            if is_spread(getattr(*places[0])):
                raise ChainError(f"{name} is used on the first and the last rank: leave it to FSDP's outermost module.")
        return True

    def _versions(self) -> dict[str, tuple[int, int]]:
        buffers = {name: self._model.get_buffer(name) for name in self._buffers}
        return {name: (id(buffer), version(buffer)) for name, buffer in buffers.items()}

    def _send_weights(self) -> list[Tensor]:
        if not self._owned:
            return []
        weights = {name: getattr(*places[0]) for name, places in self._owned.items()}
        trained = [weight.requires_grad for weight in weights.values()]
        what = f"the values of {_list(weights)}"
        self.give([whole(w.detach()) for w in weights.values()], self._other, SHARED, what, trained)
        live = {name: weight for name, weight in weights.items() if weight.requires_grad}
        if not live or not torch.is_grad_enabled():
            return []
        # Made before all else of the pass, and so what its backward pass comes to last: the chain is solved by then.
        take = partial(self._take_gradients, list(live), self.number)
        return list(Sent.apply(take, len(live), [True], *live.values(), torch.zeros((), device=self.device)))

    def _receive_weights(self, values: Sequence[Tensor], trained: Sequence[bool]) -> list[Tensor]:
        # To see their use, frozen ones need a gradient in the first training pass, too.
        noting = self._used is not None
        found = dict(zip(self._remote, values, strict=True))
        live = [name for name, own in zip(found, trained, strict=True) if own]
        names = [name for name, value in found.items() if _is_real(value)] if noting else live
        arrived: tuple[Tensor, ...] = ()
        if names and torch.is_grad_enabled():
            send = partial(self._give_gradients, names, live, self.number)
            arrived = Arrived.apply(send, len(names), *(found[name] for name in names), anchor())
        if self._used is not None and arrived:
            self._names, self._node = names, arrived[0].grad_fn
            self._used |= found.keys() - names
        for name, tensor in (found | dict(zip(names, arrived, strict=False))).items():
            _put(self._remote[name], tensor)
        return list(arrived[:1])

    def _give_gradients(
        self, names: Sequence[str], live: Sequence[str], number: int, gradients: Sequence[Cotangent]
    ) -> None:
        used = {n: g for n, g in zip(names, gradients, strict=True) if n in live and n in self._remote}
        if used:
            found = {name: g for name, g in used.items() if g is not None}
            what = f"the gradients of {_list(used)}"
            self.messages.give(list(found.values()), self._other, number, SHARED, what, list(found))

    def _take_gradients(self, names: Sequence[str], number: int, _: Sequence[Cotangent]) -> list[Cotangent]:
        used = [name for name in names if name in self._owned]
        if not used:
            return [None] * len(names)
        what = f"the gradients of {_list(used)}"
        gradients, given = self.messages.take(self._other, number, SHARED, what, self.device)
        found = dict(zip(given, gradients, strict=True))
        return [found.get(name) for name in names]


def _places(model: nn.Module, placement: Placement) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return where each parameter of the model is, by its first name."""
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(placement.names[f"{path}.{name}" if path else name], []).append((module, name))
    return places


def _put(places: Places, tensor: Tensor) -> None:
    for module, name in places:
        setattr(module, name, tensor)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _list(names: Mapping[str, object] | Sequence[str]) -> str:
    return ", ".join(names)
