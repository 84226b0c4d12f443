"""Compares an engine's gradients with exact ones on the same batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.chains.bypass import bypass_message
from gradfree.chains.handle import Handle
from gradfree.devices.hardware import widest_float, without_tf32
from gradfree.dry_runs.intact import left_intact
from gradfree.engines.discovery import Chains
from gradfree.engines.engine import Engine
from gradfree.errors import ChainError
from gradfree.layers.roles import weight_of
from gradfree.torchside.sharding import is_dtensor
from gradfree.wording import one


@dataclass(frozen=True)
class Agreement:
    """The agreement of the engine's gradient g with the exact gradient g*.

    The loss is that of the model with the engine attached. An engine with a temperature, a factor on the chain's
    output, takes the error without that factor. Then the best gradient of the chain's parameters is
    g = g* / temperature, with a cosine of 1 and a norm ratio of 1/temperature.

    Attributes:
        cosine: g · g* / (‖g‖ ‖g*‖); NaN if one of them is zero. With several samples, their mean.
        norm_ratio: ‖g‖ / ‖g*‖; NaN or inf if g* is zero. With several samples, their mean.
        relative_error: ‖g - g*‖ / ‖g*‖; NaN or inf if g* is zero. With several samples, the root of the mean square.
        bias: ‖E g - g*‖ / ‖g*‖, estimated from several samples, without the share of their spread; NaN for one.
        spread: the standard deviation of g, √(E ‖g - E g‖²) / ‖g*‖, estimated from several samples; NaN for one.
    """

    cosine: float
    norm_ratio: float
    relative_error: float
    bias: float = nan
    spread: float = nan


@dataclass(frozen=True)
class Fidelity:
    """The agreement of the whole gradient and of its parts.

    Attributes:
        total: all parameters together, as one vector.
        chains: only the parameters of the chains' blocks. Those after a chain (the head) are exact with every engine.
        layers: the parameters of each module together, by its path.
        parameters: each parameter that has an exact gradient, by name.
        states: the cotangents δ of the blocks' outputs that the engine has computed, by the block's path; for a
            recurrent layer all steps together.
        feedback: the cosine of feedback weights B and the layer's weights W, by the layer's path, if there are any.
    """

    total: Agreement
    chains: Agreement
    layers: dict[str, Agreement]
    parameters: dict[str, Agreement]
    states: dict[str, Agreement]
    feedback: dict[str, float]

    def __str__(self) -> str:
        width = max(map(len, [*self.parameters, "parameter"]))
        sampled = not isnan(self.total.spread)
        more = "       bias     spread" if sampled else ""
        rows = [f"{'parameter':{width}}   cosine  norm ratio  relative error{more}"]
        for name, a in [*self.parameters.items(), ("the chains", self.chains), ("all", self.total)]:
            more = f"  {a.bias:9.3e}  {a.spread:9.3e}" if sampled else ""
            rows.append(f"{name:{width}}  {a.cosine:7.4f}  {a.norm_ratio:10.4f}  {a.relative_error:14.3e}{more}")
        return "\n".join(rows)


def gradient_fidelity(
    engine: Engine,
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Sequence[Any] | Mapping[str, Any],
    chains: Chains | None = None,
    *,
    samples: int = 1,
) -> Fidelity:
    """Compare the engine's gradients with those of exact backpropagation; the model does not change.

    Runs the model twice on the same batch with the same random numbers (dropout masks), with the engine attached both
    times. The reference is backpropagation through the same loss, including a temperature: see :class:`Agreement`.
    TF32 is off meanwhile, since its rounding would hide small differences. Weights, buffers, ``.grad`` and random
    states are restored.

    Args:
        engine: to compare; must not be attached to the model.
        model: in the mode (train or eval) in which to compare.
        loss_fn: called as ``loss_fn(model(*inputs), target)``, or as ``loss_fn(model(**batch))``; returns a scalar.
        batch: ``(*inputs, target)``, or a mapping of the model's keyword arguments.
        chains: as in :meth:`gradfree.Engine.attach`.
        samples: the number of passes with the engine. Engines that draw random numbers (``forward_gradient``) draw the
            same ones in the first pass of each call. More samples show their bias and spread: see :class:`Agreement`.

    Raises:
        ChainError: the engine cannot be attached, the pass is not supported or bypasses the engine, or FSDP has
            sharded the model.
        ValueError: the model has no trainable parameter, the batch no target, or ``samples`` is not positive.
        TypeError: an argument is of the wrong type, such as a tensor as ``batch``; or the loss is not a scalar.
    """
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be an Engine, from gradfree.create_engine(name), not {_kind(engine)}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {_kind(model)}.")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of outputs and target, not {loss_fn!r}.")
    if isinstance(samples, bool) or not isinstance(samples, int):
        raise TypeError(f"samples must be an integer, not {samples!r}.")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, not {samples}.")
    trained = _trained(model)
    loss_of = _loss_of(model, loss_fn, batch)

    def gradients() -> tuple[Tensor | None, ...]:
        with left_intact(model), without_tf32(), torch.enable_grad():
            loss = loss_of()
            if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
                raise TypeError(f"loss_fn must return one number with a gradient, a scalar tensor, not {_kind(loss)}.")
            return torch.autograd.grad(loss, list(trained.values()), allow_unused=True)

    targets = None if isinstance(batch, Mapping) else batch[-1]
    with engine.attach(model, chains) as handle, handle.lesson(targets, loss_of):
        return _compare(trained, handle, gradients, samples)


def loss_fidelity(loss: Tensor, model: nn.Module, handle: Handle) -> Fidelity:
    """Compare the gradients that ``loss.backward()`` would compute with exact ones, on the same graph.

    The figures are those of :func:`gradient_fidelity`, also with a temperature: see :class:`Agreement`. Only the
    backward pass runs, twice. Weights, buffers, ``.grad``, random states and the engine's memory do not change, and
    ``loss.backward()`` works afterwards. Hooks on parameters see both passes.

    Args:
        loss: a scalar, computed with the engine attached.
        model: the model that computed it.
        handle: of the engine.

    Raises:
        ChainError: the pass is not supported or bypassed the engine, or FSDP has resharded the parameters since.
        ValueError: the model has no trainable parameter.
    """
    trained = _trained(model)

    def gradients() -> tuple[Tensor | None, ...]:
        with without_tf32():
            return torch.autograd.grad(loss, list(trained.values()), allow_unused=True, retain_graph=True)

    remembered = handle.state_dict()
    try:
        with handle.frozen():
            return _compare(trained, handle, gradients)
    finally:
        handle.load_state_dict(remembered)


def _kind(thing: Any) -> str:
    """Return a short description of a wrong argument for messages; the repr of a tensor or model is too long."""
    if isinstance(thing, Tensor):
        return f"a tensor of shape {tuple(thing.shape)}" + ("" if thing.requires_grad else " without a gradient")
    return repr(thing) if isinstance(thing, str | float) else one(type(thing).__name__)


def _loss_of(
    model: nn.Module, loss_fn: Callable[..., Tensor], batch: Sequence[Any] | Mapping[str, Any]
) -> Callable[[], Tensor]:
    """Return a function that computes the loss."""
    if isinstance(batch, Mapping):
        return lambda: loss_fn(model(**batch))
    if not isinstance(batch, Sequence):
        raise TypeError(
            "batch must be a tuple, (*inputs, target), or a mapping of keyword arguments, not "
            f"{one(type(batch).__name__)}."
        )
    if len(batch) < 2:
        raise ValueError(f"batch must be a tuple, (*inputs, target), but has {len(batch)} of these.")
    *inputs, target = batch
    return lambda: loss_fn(model(*inputs), target)


def _refuse_bypassed(handle: Handle, trained: Mapping[str, Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Raise if the engine runs on no block of a chain; warn if it runs on some blocks only."""
    given = {id(p) for p, g in zip(trained.values(), gradients, strict=True) if g is not None}
    for site in handle.chains.values():
        if message := bypass_message(site, lambda p: id(p) in given):
            if not site.solved:
                raise ChainError(message)
            warnings.warn(message, stacklevel=4)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    trained: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError(f"{type(model).__name__} has no parameter that requires a gradient.")
    if sharded := next((name for name, p in trained.items() if is_dtensor(p)), None):
        raise ChainError(
            f"{sharded} is sharded by FSDP and not gathered now, so its gradient cannot be compared. Compare before "
            "sharding or, on the graph of a training step, with fully_shard(model, reshard_after_forward=False)."
        )
    return trained


def _compare(
    trained: Mapping[str, Tensor], handle: Handle, gradients: Callable[[], Sequence[Tensor | None]], samples: int = 1
) -> Fidelity:
    """Compute the ``gradients`` of the parameters ``trained`` with the engine and exactly, and compare them."""
    deltas: list[dict[str, Tensor]] = [{} for _ in range(samples)]
    exact_deltas: dict[str, Tensor] = {}
    approximate = []
    for own in deltas:
        with handle.setting(deltas=own, differences=None):
            approximate.append(gradients())
    _refuse_bypassed(handle, trained, approximate[0])
    with handle.setting(deltas=exact_deltas, use_exact=True):
        exact = gradients()
    sites = handle.chains.values()
    inside = {id(p) for site in sites for block in site.blocks.values() for p in block.parameters()}
    pairs: dict[str, _Pair] = {
        name: ([torch.zeros_like(e) if a is None else a for a in drawn], e)
        for name, e, *drawn in zip(trained, exact, *approximate, strict=True)
        if e is not None
    }
    layers: dict[str, list[_Pair]] = {}
    for name, pair in pairs.items():
        layers.setdefault(name.rpartition(".")[0], []).append(pair)
    states = {path: e for path, e in [*exact_deltas.items()][::-1] if all(path in own for own in deltas)}
    return Fidelity(
        total=_agreement(pairs.values()),
        chains=_agreement([pair for name, pair in pairs.items() if id(trained[name]) in inside]),
        layers={path: _agreement(of_layer) for path, of_layer in layers.items()},
        parameters={name: _agreement([pair]) for name, pair in pairs.items()},
        states={path: _agreement([([own[path] for own in deltas], e)]) for path, e in states.items()},
        feedback={
            path: _agreement([([matrix], weight_of(site.blocks[path]))]).cosine
            for site in sites
            for path, matrix in site.feedback_weights().items()
        },
    )


_Pair = tuple[Sequence[Tensor], Tensor]
"""The engine's gradients, one for each sample, and the exact one."""


def _agreement(pairs: Collection[_Pair]) -> Agreement:
    """Compare (g, g*) pairs, taken together as one vector each."""
    exact = _joined(e for _, e in pairs)
    drawn = [_joined(own) for own in zip(*(samples for samples, _ in pairs), strict=True)] or [exact]
    # Not by @ and norm(), whose rounding in float32 is up to 1e-5.
    size = exact.square().sum()
    squares = torch.stack([g.square().sum() for g in drawn])
    cosines = torch.stack([(g * exact).sum() for g in drawn]) / (squares * size).sqrt()
    errors = torch.stack([(g - exact).square().sum() for g in drawn]) / size
    ratios = squares.sqrt() / size.sqrt()
    found = cosines.mean().item(), ratios.mean().item(), errors.mean().sqrt().item()
    count = len(drawn)
    if count == 1:
        return Agreement(*found)
    mean = torch.stack(drawn).mean(0)
    variance = torch.stack([(g - mean).square().sum() for g in drawn]).sum() / (count - 1) / size
    bias = ((mean - exact).square().sum() / size - variance / count).clamp(min=0)
    return Agreement(*found, bias.sqrt().item(), variance.sqrt().item())


def _joined(gradients: Iterable[Tensor]) -> Tensor:
    return torch.cat([*map(_vector, gradients)] or [torch.zeros(0)])


def _vector(grad: Tensor) -> Tensor:
    grad = grad.to_dense() if grad.is_sparse else grad
    return (torch.view_as_real(grad) if grad.is_complex() else grad).flatten().to(widest_float(grad.device))
