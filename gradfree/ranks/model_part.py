"""One rank's part of a model, and what concerns the whole: states for checkpoints, the norm of all gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from gradfree.errors import ChainError
from gradfree.ranks.messages import Messages
from gradfree.ranks.placeholders import vacate
from gradfree.ranks.placement import Placement
from gradfree.torchside.sharding import whole


class ModelPart:
    """Leaves of a model what one rank holds; puts states of all ranks together by the names that the model had before.

    Args:
        model: changed in place.
        placement: what lies where.
        messages: the ranks.

    Attributes:
        run: the paths of this rank's blocks.
        absent: names of the weights that are not here, by the ids of their placeholders.
    """

    def __init__(self, model: nn.Module, placement: Placement, messages: Messages):
        self.model, self.placement, self.messages = model, placement, messages
        self._keys = list(model.state_dict())
        run = placement.runs[messages.position]
        self.run = placement.blocks[run.start : run.stop]
        held = {id(p) for name, p in model.named_parameters() if self._holds(name)}
        here = {module for path in self.run for module in model.get_submodule(path).modules()}
        chain = {module for path in placement.blocks for module in model.get_submodule(path).modules()}
        self.absent = vacate(model, held, chain - here)
        self._seen: set[object] = set()

    def is_new(self, what: object) -> bool:
        """Return whether ``what`` is asked for the first time."""
        new = what not in self._seen
        self._seen.add(what)
        return new

    @property
    def device(self) -> torch.device:
        """Where its states are: with its weights."""
        return next(self.model.parameters()).device

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model, on the CPU, on the first rank; nothing on the others."""
        own = {key: value for key, value in self.model.state_dict().items() if self._holds(key)}
        found = {key: value for its in self.messages.gathered(_on_cpu(own)) or () for key, value in its.items()}
        return {key: found[key] for key in self._keys if key in found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of the state of a whole model, however many ranks or processes wrote it.

        Raises:
            ChainError: other keys; nothing is loaded then.
        """
        if wrong := set(self._keys) ^ state.keys():
            raise ChainError(f"the state is not that of this model: {sorted(wrong)[0]!r} is only in one of them.")
        self.model.load_state_dict({key: state[key] for key in self.model.state_dict()})

    def optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of one optimizer of the whole model, on the CPU, on the first rank; nothing on the others.

        It is that of an optimizer over the whole model's parameters, or groups of them, in the model's order.
        """
        names = self._names()
        own = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        state = {names[id(p)]: kept for p, kept in optimizer.state.items()}
        found = self.messages.gathered((own, _on_cpu(state)))
        if found is None:
            return {}
        groups = self._numbered([groups for groups, _ in found])
        numbers = {name: n for group in groups for name, n in group.items()}
        options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return {
            "state": {numbers[name]: kept for _, its in found for name, kept in its.items()},
            "param_groups": [o | {"params": list(g.values())} for o, g in zip(options, groups, strict=True)],
        }

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take this rank's part of the state of an optimizer of the whole model."""
        names = self._names()
        own = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        groups = self._numbered(self.messages.exchanged(own, "the groups of its optimizer"))
        local = optimizer.state_dict()
        kept: dict[int, Any] = {}
        for ids, its, numbers in zip(local["param_groups"], own, groups, strict=True):
            pairs = zip(ids["params"], its, strict=True)
            kept |= {n: state["state"][numbers[name]] for n, name in pairs if numbers[name] in state["state"]}
        options = [
            its | {"params": mine["params"]}
            for mine, its in zip(local["param_groups"], state["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({"state": kept, "param_groups": options})

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Scale the gradients of all ranks so that their norm, as one vector, is ``max_norm`` at most; return it.

        As ``torch.nn.utils.clip_grad_norm_`` of one process; every rank must call it.

        Args:
            max_norm: the largest norm.
            norm_type: which norm.
            parameters: this rank's whose gradients are meant; by default all.
        """
        own = self.model.parameters() if parameters is None else parameters
        grads = [p.grad for p in own if p.grad is not None]
        norms = [whole(torch.linalg.vector_norm(g, norm_type)).to(self.device) for g in grads]
        norms = norms or [torch.zeros((), device=self.device)]
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        total = torch.linalg.vector_norm(self.messages.all_numbers(norm), norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device))
        return total

    def _holds(self, key: str) -> bool:
        return self.placement.home.get(key) == self.messages.position

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.model.named_parameters()}

    def _numbered(self, of_ranks: list[list[list[str]]]) -> list[dict[str, int]]:
        """Return for each group the numbers of its parameters by name, as an optimizer of the whole model has them."""
        order = {name: n for n, name in enumerate(self.placement.home)}
        first = 0
        groups = []
        for its in zip(*of_ranks, strict=True):
            names = sorted((name for names in its for name in names), key=order.__getitem__)
            groups.append({name: first + n for n, name in enumerate(names)})
            first += len(names)
        return groups


def _on_cpu(state: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: whole(tensor.detach()).cpu(), state)
