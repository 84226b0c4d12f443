"""Dense Jacobians, JVPs and batch checks of the links of a chain in depth, per sample of the batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import reduce

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent
from gradfree.depth.link import Link, local_backward, span
from gradfree.errors import COMPLEX_JACOBIAN, MIXES, ChainError
from gradfree.torchside.batched_vjps import batched_vjps
from gradfree.torchside.guards import refuse_unless
from gradfree.torchside.private import is_simulated


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
    rows = links[0].out.new_zeros(len(links), batch, widest, dtype=_wide_dtype([link.out for link in links]))
    for row, cotangent in zip(rows, cotangents, strict=True):
        if cotangent is not None:
            row[:, : width(cotangent)] = cotangent.reshape(batch, width(cotangent))
    return rows


def jacobians(links: Sequence[Link], mixing: Mixing) -> Tensor:
    """Return (L - 1, B, H, H); see :meth:`.Chain.jacobians`.

    Raises:
        ChainError: a link mixes samples, or its state is complex.
    """
    for link in links:
        if link.out.is_complex():
            raise COMPLEX_JACOBIAN.error(path=link.path)
    batch, widest = samples(links[0].out), max(width(link.out) for link in links)
    result = links[0].out.new_zeros(
        len(links) - 1, batch, widest, widest, dtype=_wide_dtype([link.out for link in links])
    )
    live = [i for i in range(1, len(links)) if links[i].state is not None]
    identity = torch.eye(widest, dtype=result.dtype, device=result.device)
    rows = [
        torch.cat([identity[:, : width(links[i].out)].unsqueeze(1).expand(-1, batch, -1), probes(links[i].out)])
        for i in live
    ]
    answers: list[tuple[Link, Tensor]] = []
    for i, vjp in zip(live, _vjps([links[i] for i in live], rows), strict=True):
        if vjp is not None:
            result[i - 1, ..., : vjp.shape[-1]] = vjp[:widest].transpose(0, 1)
            answers.append((links[i], vjp[widest:]))
    mixing.refuse(answers)
    return result


def jvps(links: Sequence[Link], tangents: Tensor, mixing: Mixing) -> Tensor:
    """Return (N, L, B, H); see :meth:`.Chain.jvps`.

    Raises:
        ChainError: a link mixes samples.
    """
    result = torch.zeros_like(tangents)
    answers: list[tuple[Link, Tensor]] = []
    for i in range(1, len(links)):
        before, link = links[i - 1], links[i]
        if link.state is not None:
            tangent = (result[:, i - 1] + tangents[:, i - 1])[..., : width(before.out)]
            given = torch.cat([tangent, probes(before.out).to(tangent.dtype)])
            moved = _jvps(link, given.reshape(len(given), *before.out.shape))
            moved = moved.reshape(len(given), tangents.shape[2], width(link.out))
            result[:, i, :, : width(link.out)] = moved[: len(tangent)]
            answers.append((link, moved[len(tangent) :]))
    mixing.refuse(answers)
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


def probes(state: Tensor) -> Tensor:
    """Return two cotangents or tangents of ``state``, (2, B, width): of the first sample, and of all others.

    No symmetry of a block maps them to zero, and they use no random numbers.
    """
    count = torch.arange(1.0, samples(state) * width(state) + 1, device=state.device)
    rows = (count * count).sin().reshape(samples(state), width(state))
    first = torch.arange(len(rows), device=state.device).unsqueeze(-1) == 0
    return torch.stack([rows * first, rows * ~first]).to(_wide_dtype([state]))


class Mixing:
    """Checks in each pass whether blocks mix the samples of a batch, as batch normalization does in training.

    A block may begin to do so at any time. On a GPU the host waits for the result once for each set of a block's layers
    and modes; later checks are assertions on the device.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, Hashable]] = set()

    def refuse(self, answers: Sequence[tuple[Link, Tensor]]) -> None:
        """Raise if a link mixes samples: its Jacobian is then not one matrix per sample.

        Args:
            answers: links, each with its VJPs or JVPs of :func:`probes`, which must be zero for all other samples.

        Raises:
            ChainError: a block mixes samples; the first one is named, or on a GPU, later, all of them.
        """
        if not answers or is_simulated(answers[0][1]):
            return
        mixed = torch.stack([(torch.cat([a[0, 1:], a[1, :1]]).abs() > 0).any() for _, a in answers])
        links = [link for link, _ in answers]
        if mixed.device.type != "cpu":
            modes = {(link.path, tuple((type(m), m.training) for m in link.block.modules())) for link in links}
            if modes <= self._known:
                refuse_unless(~mixed.any(), MIXES.message(path=span(links[::-1])))
                return
            self._known |= modes
        for link, mixes in zip(links, mixed.tolist(), strict=True):
            if mixes:
                self._known.clear()
                raise MIXES.error(path=link.path)


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


def _wide_dtype(states: Sequence[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (state.dtype for state in states), torch.float32)
