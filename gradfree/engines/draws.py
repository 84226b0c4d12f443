"""Random numbers that are new in each pass, and the same again after a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from gradfree.chains.chain import Chain


def new_generator(chain: Chain, owner: str, seed: int, device: torch.device) -> torch.Generator:
    """Return a generator whose numbers depend on ``seed``, the chain, the rank, the device and the earlier passes.

    Args:
        chain: whose memory counts the passes.
        owner: the name under which it counts them.
        seed: of the engine.
        device: of the numbers.
    """
    kept = chain.memory.of(owner)
    # Through numpy: .item() counts as a wait for the device, but this counter is on the CPU.
    passes = int(kept["passes"].cpu().numpy()) + 1 if "passes" in kept else 1
    kept["passes"] = torch.tensor(passes, device="cpu")
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    number = zlib.crc32(f"{seed} {chain.path} {rank} {passes}".encode())
    return torch.Generator(device).manual_seed(number)


def normal(generator: torch.Generator, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return normal numbers, drawn on the device of ``generator``, with the dtype and the device of ``like``.

    Both parts of complex numbers have variance 1.
    """
    if like.is_complex():
        parts = torch.randn((*shape, 2), generator=generator, device=generator.device)
        return torch.view_as_complex(parts).to(like)
    return torch.randn(shape, generator=generator, device=generator.device).to(like)
