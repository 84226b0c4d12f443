"""Dense Jacobians, JVPs and batch checks of the links of a chain in depth, per sample of the batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import reduce

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent
from gradfree.depth.link import Link, local_backward, span
from gradfree.errors import ChainError
from gradfree.torchside.batched_vjps import batched_vjps


def samples(state: Tensor) -> int:
    """Return the number of samples in ``state``: its first dimension, or one if it has no other dimension."""
    return state.shape[0] if state.dim() > 1 else 1


def width(state: Tensor) -> int:
    """Return the number of elements of one sample."""
    return (state.shape[1:] if state.dim() > 1 else state.shape).numel()


def vectors(links: Sequence[Link], cotangents: Sequence[Cotangent]) -> Tensor:
    """Return (L, B, H); see :meth:`.Chain.vectors`."""
    batch, widest = samples(links[0].out), max(width(link.out) for link in links)
    for link in links:
        if samples(link.out) != batch:
            raise ChainError(
                f"{link.path} returns a state of {samples(link.out)} samples, the blocks before it return {batch}: "
                "the first dimension of every state must be the batch. Use the engine 'backprop'."
            )
    rows = links[0].out.new_zeros(len(links), batch, widest, dtype=_wide_dtype(links))
    for row, cotangent in zip(rows, cotangents, strict=True):
        if cotangent is not None:
            row[:, : width(cotangent)] = cotangent.reshape(batch, width(cotangent))
    return rows


def jacobians(links: Sequence[Link]) -> Tensor:
    """Return (L - 1, B, H, H); see :meth:`.Chain.jacobians`. The links must not mix samples."""
    batch, widest = samples(links[0].out), max(width(link.out) for link in links)
    result = links[0].out.new_zeros(len(links) - 1, batch, widest, widest, dtype=_wide_dtype(links))
    live = [i for i in range(1, len(links)) if links[i].state is not None]
    identity = torch.eye(widest, dtype=result.dtype, device=result.device)
    rows = [identity[:, : width(links[i].out)].unsqueeze(1).expand(-1, batch, -1) for i in live]
    for i, vjp in zip(live, _vjps([links[i] for i in live], rows), strict=True):
        if vjp is not None:
            result[i - 1, ..., : vjp.shape[-1]] = vjp.transpose(0, 1)
    return result


def jvps(links: Sequence[Link], tangents: Tensor) -> Tensor:
    """Return (N, L, B, H); see :meth:`.Chain.jvps`. The links must not mix samples."""
    result = torch.zeros_like(tangents)
    for i in range(1, len(links)):
        before, link = links[i - 1], links[i]
        if link.state is not None:
            tangent = (result[:, i - 1] + tangents[:, i - 1])[..., : width(before.out)]
            moved = _jvps(link, tangent.reshape(len(tangent), *before.out.shape))
            result[:, i, :, : width(link.out)] = moved.reshape(*moved.shape[:1], tangents.shape[2], -1)
    return result


def _jvps(link: Link, tangents: Tensor) -> Tensor:
    """Return F_i v of N tangents v of the state before the link.

    The VJP is linear in its cotangent, and the VJP of that map is the JVP. So the block need not run again.
    """
    cotangent = torch.zeros_like(link.out, requires_grad=True)
    source, state, given = link.source, link.state, link.writable(cotangent)
    assert state is not None
    try:
        (vjp,) = torch.autograd.grad(source, state, given, create_graph=True)
        (moved,) = batched_vjps([vjp], [cotangent], [tangents.to(vjp.dtype)], link.writes)
        reason = "autograd has not recorded it"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        moved, reason = None, str(error).partition("\n")[0]
    if moved is None:
        raise ChainError(
            f"the backward pass of {link.path} cannot be differentiated, which a Jacobian-vector product needs: "
            f"{reason}. Attention with torch's MATH kernel can be differentiated: run the model under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH). Otherwise, use another engine."
        )
    return moved


class Mixing:
    """Checks whether blocks mix the samples of a batch, as batch normalization does in training.

    A block is checked once for each set of its layers and modes, because reading the result waits for the device.
    """

    def __init__(self) -> None:
        self._checked: set[tuple[str, Hashable]] = set()

    def refuse(self, links: Sequence[Link]) -> None:
        """Raise if a link mixes samples: its Jacobian is then not one matrix per sample.

        The VJP of the first sample's cotangent must be exactly zero for all other samples, and the other way round.

        Raises:
            ChainError: a block mixes samples; the first one is named.
        """
        batch = samples(links[-1].out)
        if batch < 2:
            return
        modes = {link.path: tuple((type(m), m.training) for m in link.block.modules()) for link in links[1:]}
        new = [link for link in links[1:] if link.state and (link.path, modes[link.path]) not in self._checked]
        if not new:
            return
        first = torch.arange(batch, device=links[-1].out.device) == 0
        chosen = torch.stack([first, ~first]).unsqueeze(-1)
        vjps = _vjps(new, [_asymmetric(link.out) * chosen for link in new])
        mixed = [first.new_zeros(()) if v is None else ((v * ~chosen).abs() > 0).any() for v in vjps]
        for link, mixes in zip(new, torch.stack(mixed).tolist(), strict=True):
            if mixes:
                raise ChainError(
                    f"{link.path} mixes the samples of a batch, as batch normalization does in training: it has no "
                    "Jacobian for each of them. Use another normalization, eval() for that module, a batch in the "
                    "first dimension of the states if there is none, or the engine 'backprop'."
                )
        self._checked.update(modes.items())


def _asymmetric(state: Tensor) -> Tensor:
    """Return a cotangent (B, width) that no symmetry of a block maps to zero; uses no random numbers."""
    count = torch.arange(1.0, samples(state) * width(state) + 1, device=state.device)
    return (count * count).sin().reshape(samples(state), width(state))


def _vjps(links: Sequence[Link], rows: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the VJPs of N cotangents (N, B, width) of each link: (N, B, width of the state before it)."""
    if not links:
        return []
    pairs = zip(links, rows, strict=True)
    cotangents = [row.reshape(len(row), *link.out.shape).to(link.out.dtype) for link, row in pairs]
    with local_backward(span(links[::-1]), cotangents):
        writes = any(link.writes for link in links)
        vjps = batched_vjps([link.out for link in links], [link.state for link in links], cotangents, writes)
    return [v if v is None else v.unsqueeze(1) if v.dim() == 2 else v.flatten(2) for v in vjps]


def _wide_dtype(links: Sequence[Link]) -> torch.dtype:
    return reduce(torch.promote_types, (link.out.dtype for link in links), torch.float32)
