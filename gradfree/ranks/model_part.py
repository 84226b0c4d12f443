"""One rank's part of a model, with checkpoints and gradient clipping for the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradfree.errors import ChainError
from gradfree.ranks.messages import Messages
from gradfree.ranks.placeholders import remove_absent
from gradfree.ranks.placement import Placement
from gradfree.torchside.sharding import whole


class ModelPart:
    """Removes the weights of other ranks from a model, and joins the states of all ranks under their original names.

    Args:
        model: changed in place.
        placement: which rank holds what.
        messages: connects the ranks.

    Attributes:
        run: the paths of this rank's blocks.
        absent: the names of the removed weights, by the ids of their placeholders.
    """

    def __init__(self, model: nn.Module, placement: Placement, messages: Messages):
        self.model, self.placement, self.messages = model, placement, messages
        self._keys = list(model.state_dict())
        run = placement.runs[messages.position]
        self.run = placement.blocks[run.start : run.stop]
        held = {id(p) for name, p in model.named_parameters() if self._holds(name)}
        here = {module for path in self.run for module in model.get_submodule(path).modules()}
        chain = {module for path in placement.blocks for module in model.get_submodule(path).modules()}
        self.absent = remove_absent(model, held, chain - here)
        self._seen: set[object] = set()

    def is_new(self, what: object) -> bool:
        """Return whether this is the first call with ``what``: for checks that run once."""
        new = what not in self._seen
        self._seen.add(what)
        return new

    @property
    def device(self) -> torch.device:
        """The device of this rank's weights, and so of its states."""
        return next(self.model.parameters()).device

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model, on the CPU, on the first rank; an empty dictionary on the others."""
        here = {key: value for key, value in self.model.state_dict().items() if self._holds(key)}
        found = {key: value for part in self.messages.gather(_on_cpu(here)) or () for key, value in part.items()}
        return {key: found[key] for key in self._keys if key in found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of the state of a whole model, saved with any number of ranks or without ranks.

        Raises:
            ChainError: the keys differ; nothing is loaded then.
        """
        if wrong := set(self._keys) ^ state.keys():
            key = sorted(wrong)[0]
            where = "only the state has" if key in state else "only the model has"
            raise ChainError(f"the state is not that of this model: {where} {key!r}.")
        self.model.load_state_dict({key: state[key] for key in self.model.state_dict()})

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer of the whole model, on the CPU, on the first rank; ``{}`` on the others.

        The state is that of one optimizer over the whole model's parameters, or groups of them, in the model's order.
        """
        names = self._names()
        here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        states = {names[id(p)]: value for p, value in optimizer.state.items()}
        found = self.messages.gather((here, _on_cpu(states)))
        if found is None:
            return {}
        groups = self._numbered([groups for groups, _ in found])
        numbers = {name: n for group in groups for name, n in group.items()}
        options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return {
            "state": {numbers[name]: value for _, part in found for name, value in part.items()},
            "param_groups": [o | {"params": list(g.values())} for o, g in zip(options, groups, strict=True)],
        }

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of the state of an optimizer of the whole model."""
        names = self._names()
        here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        groups = self._numbered(self.messages.all_gather(here, "the groups of its optimizer"))
        local = optimizer.state_dict()
        states: dict[int, Any] = {}
        for group, group_names, numbers in zip(local["param_groups"], here, groups, strict=True):
            pairs = zip(group["params"], group_names, strict=True)
            states |= {n: state["state"][numbers[name]] for n, name in pairs if numbers[name] in state["state"]}
        options = [
            saved | {"params": group["params"]}
            for group, saved in zip(local["param_groups"], state["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({"state": states, "param_groups": options})

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Scale the gradients of all ranks so that their norm, as one vector, is at most ``max_norm``.

        The same as ``torch.nn.utils.clip_grad_norm_`` in one process; every rank must call it.

        Args:
            max_norm: the largest norm.
            norm_type: which norm.
            parameters: those of this rank to clip; by default all.

        Returns:
            The norm before scaling.
        """
        clipped = list(self.model.parameters() if parameters is None else parameters)
        norm = nn.utils.get_total_norm([p.grad for p in clipped if p.grad is not None], norm_type)
        norms = self.messages.all_gather_scalars(whole(norm).to(self.device))
        total = torch.linalg.vector_norm(norms, norm_type)
        nn.utils.clip_grads_with_norm_(clipped, max_norm, total)
        return total

    def _holds(self, key: str) -> bool:
        return self.placement.home.get(key) == self.messages.position

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.model.named_parameters()}

    def _numbered(self, of_ranks: list[list[list[str]]]) -> list[dict[str, int]]:
        """Return each group's parameters with their numbers in an optimizer of the whole model.

        Args:
            of_ranks: the names of the parameters, by rank and group.
        """
        order = {name: n for n, name in enumerate(self.placement.home)}
        first = 0
        groups = []
        for group in zip(*of_ranks, strict=True):
            names = sorted((name for names in group for name in names), key=order.__getitem__)
            groups.append({name: first + n for n, name in enumerate(names)})
            first += len(names)
        return groups


def _on_cpu(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return whole(state.detach()).cpu() if isinstance(state, Tensor) else state
