"""How close an engine's gradients come to exact backpropagation's on the same batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.attaching import Handle
from gradfree.engine import Engine
from gradfree.recording import refuse_entries


@dataclass(frozen=True)
class Agreement:
    """Two gradients compared, the approximate one g and the exact one g*.

    Attributes:
        cosine: g · g* / (|g| |g*|); NaN if one of them is zero.
        norm_ratio: |g| / |g*|; NaN or inf if g* is zero.
        relative_error: |g - g*| / |g*|; NaN or inf if g* is zero.
    """

    cosine: float
    norm_ratio: float
    relative_error: float


@dataclass(frozen=True)
class Fidelity:
    """The agreement of a whole gradient and of each parameter's part of it.

    Attributes:
        total: all parameters together, as one vector: what the optimizer gets.
        chains: those of the chains' blocks alone. What lies behind a chain (the head) is exact under every engine.
        parameters: each trainable parameter that exact backpropagation gives a gradient, by name.
    """

    total: Agreement
    chains: Agreement
    parameters: dict[str, Agreement]

    def __str__(self) -> str:
        width = max(map(len, [*self.parameters, "parameter"]))
        rows = [f"{'parameter':{width}}   cosine  norm ratio  relative error"]
        for name, a in [*self.parameters.items(), ("the chains", self.chains), ("all", self.total)]:
            rows.append(f"{name:{width}}  {a.cosine:7.4f}  {a.norm_ratio:10.4f}  {a.relative_error:14.3e}")
        return "\n".join(rows)


def gradient_fidelity(
    engine: Engine,
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Sequence[Any],
    chains: Sequence[str] | None = None,
    kept: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Fidelity:
    """Compare the engine's gradients with exact backpropagation's, and leave no trace.

    Runs the model twice with the same random numbers (dropout masks) on the same batch. Weights, buffers,
    ``.grad`` and the random state are afterwards as before.

    Args:
        engine: what to judge. Must not be attached to the model at the moment.
        model: in the mode (train or eval) to judge it in.
        loss_fn: called as ``loss_fn(model(*inputs), target)``; returns a scalar.
        batch: ``(*inputs, target)``.
        chains: as in :meth:`gradfree.Engine.attach`.
        kept: what the engine has kept in training so far (a running mean, random feedback): the ``state_dict()`` of
            its handle on this model, or on one of the same chains. By default it begins anew.

    Raises:
        ChainError: the engine cannot be attached, or the model's pass breaks its rules.
        ValueError: the model has no trainable parameter.
    """
    *inputs, target = batch
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient.")
    names, parameters = trained.keys(), list(trained.values())

    def gradients() -> tuple[Tensor | None, ...]:
        with _unchanged(model, inputs), torch.enable_grad():
            loss = loss_fn(model(*inputs), target)
            refuse_entries(loss)
            return torch.autograd.grad(loss, parameters, allow_unused=True)

    with engine.attach(model, chains) as handle:
        handle.load_state_dict(kept or {})
        approximate = gradients()
    sites = engine.validate(model, chains).chains.values()
    with Handle([part for site in sites for part in engine.alter(site)]):
        exact = gradients()
    blocks = [block for site in sites for block in site.blocks.values()]
    inside = {id(p) for block in blocks for p in block.parameters()}
    pairs = {
        name: (torch.zeros_like(e) if a is None else a, e)
        for name, a, e in zip(names, approximate, exact, strict=True)
        if e is not None
    }
    chained = [pairs[name] for name, p in zip(names, parameters, strict=True) if id(p) in inside and name in pairs]
    each = {name: _agreement([pair]) for name, pair in pairs.items()}
    return Fidelity(_agreement(pairs.values()), _agreement(chained), each)


def _agreement(pairs: Collection[tuple[Tensor, Tensor]]) -> Agreement:
    """Compare (g, g*) pairs, taken together as one vector each."""
    g, exact = (torch.cat([_vector(pair[i]) for pair in pairs] or [torch.zeros(0)]) for i in (0, 1))
    norm, exact_norm = g.norm(), exact.norm()
    figures = (g @ exact / (norm * exact_norm), norm / exact_norm, (g - exact).norm() / exact_norm)
    return Agreement(*(figure.item() for figure in figures))


def _vector(grad: Tensor) -> Tensor:
    grad = grad.to_dense() if grad.is_sparse else grad
    return (torch.view_as_real(grad) if grad.is_complex() else grad).flatten().double()


@contextmanager
def _unchanged(model: nn.Module, inputs: Sequence[Any]) -> Iterator[None]:
    """Restore the model's buffers, also those that it replaces, and the random state of every device in use."""
    tensors = [*model.parameters(), *(x for x in inputs if isinstance(x, torch.Tensor))]
    devices = {t.device for t in tensors if t.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    modules = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(b, b.detach().clone()) for _, buffers in modules for b in buffers.values() if b is not None]
    with torch.random.fork_rng(devices=[d.index for d in devices], device_type=kind):
        try:
            yield
        finally:
            for module, buffers in modules:
                module._buffers.update(buffers)
            with torch.no_grad():
                for buffer, value in values:
                    buffer.copy_(value)
