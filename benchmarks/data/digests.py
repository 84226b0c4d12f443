"""Digests of the user's data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gradfree.benchmarks.data.bundled import Split


def examples_digest(splits: Mapping[str, Split]) -> str:
    """Return a digest of the examples in each split, independent of their order, as loaders may shuffle.

    It is made from the sorted hashes of all examples. A million small examples take about two seconds, large ones
    about a second for each GB.
    """
    digest = hashlib.blake2b()
    for name, split in splits.items():
        kinds = [f"{x.dtype} {tuple(x.shape[1:])}" for x in split]
        digest.update(f"{name} {len(split.inputs)} {kinds}\n".encode())
        digest.update(b"".join(sorted(_hashes(split))))
    return digest.hexdigest()[:8]


def _hashes(split: Split) -> Iterator[bytes]:
    for row in zip(*map(_bytes, split), strict=True):
        yield hashlib.blake2b(b"".join(row), digest_size=16).digest()


def _bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of each example."""
    rows = tensor.detach().cpu().unsqueeze(-1).flatten(1).contiguous()
    # As bytes, since numpy does not have all of torch's dtypes.
    return (row.data for row in rows.view(torch.uint8).numpy())
