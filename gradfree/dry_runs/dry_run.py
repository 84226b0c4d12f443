"""One forward and backward pass of a model with an engine attached; everything is restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.chains.bypass import bypass_message
from gradfree.chains.handle import Handle
from gradfree.chains.report import Report
from gradfree.chains.solving import engine_figures
from gradfree.chains.survey import LinkFindings
from gradfree.depth.ports import tensors_in
from gradfree.devices.hardware import widest_float
from gradfree.dry_runs.intact import left_intact
from gradfree.errors import ChainError
from gradfree.time.layout_report import layout_notes
from gradfree.torchside.hooks import without_hooks

Batch = Tensor | Sequence[Any] | Mapping[str, Any]
"""The arguments of a model's ``forward``: one tensor, a sequence of arguments, or a mapping of keyword arguments."""


def dry_run(attach: Callable[[], Handle], model: nn.Module, batch: Batch, notes: Sequence[str] = ()) -> Report:
    """Run ``model`` forward and backward once; return a report with findings about its chains.

    The loss is the one that the model returns, or else a fixed weighted sum of its outputs.

    Args:
        attach: attaches the engine to the model.
        model: in the mode in which it will be trained.
        batch: the arguments of its ``forward``.
        notes: of the report, to which this function adds.
    """
    args, kwargs = _arguments(batch)
    trained = [p for p in model.parameters() if p.requires_grad]
    problems: list[str] = []
    reached: set[int] = set()
    surveys: dict[str, list[Sequence[LinkFindings]]] = {}
    with left_intact(model), attach() as handle:
        with handle.setting(surveys=surveys), torch.enable_grad(), without_hooks(trained), engine_figures() as figures:
            try:
                reached = _reached(trained, model(*args, **kwargs))
            except ChainError as error:
                problems.append(str(error))
        chains = handle.chains
        bypassed = (bypass_message(site, lambda p: id(p) in reached) for site in chains.values())
        notes = [*notes, *(message for message in bypassed if message), *layout_notes(figures)]
    findings = {path: surveys.get(path, [])[::-1] for path in chains}
    if not model.training:
        notes.append("the dry run was in evaluation mode, like the model: call train() before training.")
    return Report(chains, problems, notes, findings)


def _arguments(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        return (), batch
    return (batch,) if isinstance(batch, Tensor) or not isinstance(batch, Sequence) else batch, {}


def _reached(trained: Sequence[Tensor], out: Any) -> set[int]:
    """Run a backward pass from the model's output; return the ids of the parameters that get a gradient."""
    roots = _roots(out)
    if not roots:
        raise ChainError("the model returned no tensor that needs a gradient: there is no backward pass.")
    probes = [_probe(root) for root in roots]
    grads = torch.autograd.grad(roots, trained, probes, allow_unused=True)
    return {id(p) for p, grad in zip(trained, grads, strict=True) if grad is not None}


def _roots(out: Any) -> list[Tensor]:
    """Return the model's loss; without one, the tensors that it returned, directly or inside containers."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return [loss]
    entries = out if isinstance(out, list | tuple) else out.values() if isinstance(out, Mapping) else [out]
    first = [entry for entry in entries if isinstance(entry, Tensor) and entry.requires_grad]
    return first or [tensor for tensor in tensors_in(out) if tensor.requires_grad]


def _probe(root: Tensor) -> Tensor:
    """Return a fixed cotangent without symmetries, so that gradients do not vanish; draws no random numbers."""
    if root.dim() == 0:
        return torch.ones_like(root)
    count = torch.arange(1.0, root.numel() + 1, dtype=widest_float(root.device), device=root.device)
    return (count * count).sin().div(root.numel()).reshape(root.shape).to(root.dtype)
