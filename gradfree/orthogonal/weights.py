"""Orthogonal weights: projection, measurement of the drift, and retraction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf

import torch
from torch import Tensor, nn

from gradfree.layers.roles import Convolution, Role, has_own_weight, role_of
from gradfree.torchside.sharding import assign, whole

_PROBES = 8
_SHRINKING_PROBES = 3
"""Power steps to find weights to scale down. Each reads all products once. Three find every drift above 3, for which
Newton-Schulz steps diverge, and most above 2."""
_FAR = 0.3
"""For a larger drift, a few Newton-Schulz steps are not enough."""


def is_matrix(layer: nn.Module) -> bool:
    """Return whether the layer multiplies each patch by its weight matrix: a linear layer, or kernel = stride.

    The windows of other convolutions overlap, so an orthogonal matrix does not make them orthogonal. A computed weight
    (``torch.nn.utils.parametrize``) is not a matrix that can be set, and does not count.
    """
    if role_of(layer) is not Role.WEIGHTS or not has_own_weight(layer):
        return False
    if not isinstance(layer, Convolution):
        return layer.weight.dim() == 2  # type: ignore[operator]
    return (
        layer.kernel_size == layer.stride
        and (layer.padding == "valid" or not any(layer.padding))
        and set(layer.dilation) == {1}
        and layer.groups == 1
    )


def orthogonalize(model: nn.Module) -> None:
    """Replace the weights of a model's linear layers, and of its convolutions with kernel = stride, by orthogonal ones.

    Each weight becomes the nearest matrix (out, in · kernel) with orthonormal rows, or columns if it has more rows than
    columns. Call this before training with an engine that keeps weights orthogonal, such as ``foton``.

    Args:
        model: any module; other layers and biases do not change.

    Raises:
        ValueError: the model has no such layer.
    """
    found = matrices(dict(model.named_modules()))
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layer, and no convolution with kernel = stride.")
    project(found.values())


def matrices(layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the weights of the layers that satisfy :func:`is_matrix`, by the layers' names."""
    return {name: layer.weight for name, layer in layers.items() if is_matrix(layer)}  # type: ignore[misc]


@torch.no_grad()
def project(weights: Iterable[Tensor]) -> None:
    """Set each weight, as a matrix, to its polar factor: the nearest matrix with orthonormal rows or columns."""
    for weight in weights:
        u, _, v = torch.linalg.svd(_wide(weight), full_matrices=False)
        assign(weight, _shaped(u @ v, weight))


@torch.no_grad()
def retract(weights: Iterable[Tensor], steps: int) -> None:
    """Retract weights with a small drift to orthogonal matrices.

    Newton-Schulz (Björck) steps, X ← 3/2 X - 1/2 X Xᵀ X: each turns a drift ε = ‖X Xᵀ - I‖ into about 3/4 ε². Weights
    with ε > 2, after too large an optimizer step, are scaled down first, because the steps would diverge.
    """
    for weight in weights:
        x = _wide(weight)
        gram = x @ x.mT
        scale = _shrinking(gram)
        x, gram = x * scale, gram * scale.square()
        for step in range(steps):
            gram = x @ x.mT if step else gram
            x = torch.addmm(x, gram, x, beta=1.5, alpha=-0.5)
        assign(weight, _shaped(x, weight))


@torch.no_grad()
def drift(weights: Sequence[Tensor]) -> Tensor:
    """Return the drift of each weight: the spectral norm ‖W Wᵀ - I‖, or ‖Wᵀ W - I‖ if W has more rows than columns.

    A few steps of the power method give a lower bound, usually within 10 %.

    Returns:
        (len(weights),), float32.
    """
    probes: Sequence[Tensor | None] = [None] * len(weights)
    for _ in range(_PROBES):
        probes, found = drift_along(weights, probes)
    return found


@torch.no_grad()
def drift_along(weights: Sequence[Tensor], probes: Sequence[Tensor | None]) -> tuple[Sequence[Tensor], Tensor]:
    """Return (W Wᵀ - I) v of each weight and its norm, for ``v`` of length one: one step of the power method.

    The norm is a lower bound of the drift. If the products are the next probes, also after small changes of the
    weights, the bound converges to the drift.

    Args:
        weights: of layers.
        probes: a v of any length for each weight, (n, 1), where n is the smaller side of its matrix; ``None`` to start.

    Returns:
        The products, (n, 1) each, in single precision at least, and the norms, (len(weights),), float32.
    """
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for i, weight in enumerate(weights):
        groups[min(len(weight), weight.shape[1:].numel()), weight.dtype, weight.device].append(i)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for group in groups.values():
        v = _directions([weights[i] for i in group], [probes[i] for i in group])
        wide = (_wide(weights[i]) for i in group)
        products = torch.stack([x @ (x.mT @ own) for x, own in zip(wide, v, strict=True)]) - v
        found.update(zip(group, zip(products, products.norm(dim=(1, 2)).float(), strict=True), strict=True))
    return [found[i][0] for i in range(len(weights))], torch.stack([found[i][1] for i in range(len(weights))])


def _directions(weights: Sequence[Tensor], probes: Sequence[Tensor | None]) -> Tensor:
    """Return ``probes`` with length one, (len(weights), n, 1); all weights have the same smaller side n."""
    n = min(len(weights[0]), weights[0].shape[1:].numel())
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    # Not symmetric: the power method never finds a drift that is orthogonal to its first vector.
    begin = torch.arange(n, dtype=dtype, device=weights[0].device).cos().unsqueeze(1)
    begin /= begin.norm()
    v = torch.zeros(len(weights), n, 1, dtype=dtype, device=begin.device)
    for own, probe in zip(v, probes, strict=True):
        # Not that of a smaller weight that was here before.
        if probe is not None and probe.shape == begin.shape:
            own.copy_(probe)  # From a checkpoint it may be on another device.
    # Plus `begin`: a probe after a projection is zero or rounding noise, whose direction differs between machines.
    v = v / v.norm(dim=1, keepdim=True).clamp_min(1e-2) + 1e-3 * begin
    return v / v.norm(dim=1, keepdim=True)


def far(weights: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the finite weights that :func:`retract` cannot correct in a few steps; waits for the device.

    Weights that are not finite are left out: projection cannot correct them either.
    """
    return {name for name, weight in weights.items() if _FAR < float(drift([weight])) < inf}


def _is_tall(weight: Tensor) -> bool:
    return len(weight) > weight.shape[1:].numel()


def _wide(weight: Tensor) -> Tensor:
    """Return the weight as a matrix with no more rows than columns, of at least single precision."""
    matrix = whole(weight).flatten(1)
    matrix = matrix.mT if _is_tall(weight) else matrix
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


def _shaped(wide: Tensor, weight: Tensor) -> Tensor:
    """Return the inverse of :func:`_wide`."""
    return (wide.mT if _is_tall(weight) else wide).reshape(weight.shape)


def _shrinking(gram: Tensor) -> Tensor:
    """Return a factor for a matrix: it scales a largest singular value above √2 to below √3, else 1."""
    # The longest column, since another may be orthogonal to the direction of a large singular value.
    v = gram.index_select(1, gram.norm(dim=0).argmax().view(1))
    for _ in range(_SHRINKING_PROBES):
        v = gram @ (v / v.norm())
    largest = v.norm()
    return torch.where(largest > 2.0, largest.rsqrt(), 1.0)
