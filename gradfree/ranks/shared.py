"""Weights that several ranks hold, since the model uses them in several places: tied embeddings, blocks that share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradfree.chains.chain import ChainGradients
from gradfree.depth.chain import DepthChain
from gradfree.ranks.crossings import Shared
from gradfree.ranks.messages import SHARED, Messages
from gradfree.ranks.placement import Placement


class SharedWeight(NamedTuple):
    """A parameter that this rank holds and others do, too.

    Attributes:
        name: its first one.
        holders: the ranks.
        places: the modules that have it, with their names for it.
    """

    name: str
    holders: Sequence[int]
    places: Sequence[tuple[nn.Module, str]]

    @property
    def parameter(self) -> Tensor:
        """What the modules have at the moment: FSDP2 puts others in its place."""
        module, name = self.places[0]
        found = module._parameters[name]
        assert found is not None
        return found


class SharedWeights:
    """All of one rank.

    Args:
        around: those of modules around the chain, which the first and the last rank hold.
        inside: those of blocks.
        messages: the ranks.
    """

    def __init__(self, around: Sequence[SharedWeight], inside: Sequence[SharedWeight], messages: Messages):
        self._around, self._inside, self._messages = around, inside, messages

    @contextmanager
    def in_place(self, number: int) -> Iterator[None]:
        """Let modules around the chain use their shared weights such that the gradients are those of all ranks.

        Args:
            number: of the pass.
        """
        trained = [weight for weight in self._around if weight.parameter.requires_grad]
        if not trained or not torch.is_grad_enabled():
            yield
            return
        total = partial(self._messages.summed, holders=trained[0].holders, number=number, what=_what(trained))
        own = [weight.parameter for weight in trained]
        _put(trained, Shared.apply(total, *own))
        try:
            yield
        finally:
            _put(trained, own)

    def summed(self, chain: DepthChain, gradients: ChainGradients, number: int) -> ChainGradients:
        """Return ``gradients``, those of weights that blocks of several ranks share summed over these."""
        numbers = {id(p): n for n, p in enumerate(chain.parameters)}
        for weight in self._inside:
            n = numbers.get(id(weight.parameter))
            if n is not None:
                own = gradients.parameters[n]
                own = torch.zeros_like(weight.parameter) if own is None else own
                (gradients.parameters[n],) = self._messages.summed([own], weight.holders, number, _what([weight]))
        return gradients


@torch.no_grad()
def shared_weights(model: nn.Module, placement: Placement, messages: Messages) -> SharedWeights:
    """Return the shared weights that this rank holds, all with the values that the first of their ranks has."""
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name in module._parameters:
            first = placement.names.get(f"{path}.{name}" if path else name)
            if first is not None and (module, name) not in places.setdefault(first, []):
                places[first].append((module, name))
    own = [
        SharedWeight(name, holders, places[name])
        for name, holders in placement.shared.items()
        if messages.position in holders
    ]
    for weight in own:
        source, *others = weight.holders
        if messages.position == source:
            for other in others:
                messages.send(weight.parameter, other, 0, SHARED, weight.name)
        else:
            weight.parameter.copy_(messages.receive(weight.parameter.detach().clone(), source, 0, SHARED, weight.name))
    messages.settle()
    inside = [weight for weight in own if placement.in_blocks(weight.name)]
    return SharedWeights([weight for weight in own if weight not in inside], inside, messages)


def _put(weights: Sequence[SharedWeight], tensors: Sequence[Any]) -> None:
    for weight, tensor in zip(weights, tensors, strict=True):
        for module, name in weight.places:
            module._parameters[name] = tensor


def _what(weights: Sequence[SharedWeight]) -> str:
    return f"the gradients of {', '.join(weight.name for weight in weights)}, which both use"
