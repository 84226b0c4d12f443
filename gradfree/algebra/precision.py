"""Multiplying matrices in the precision of their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Multiply without autocast, and on a GPU without TF32, whatever is set outside."""
    settings = torch.backends.cuda.matmul
    # From torch 2.9 on; a user of it may no longer ask for the setting of old.
    name, full = ("fp32_precision", "ieee") if hasattr(settings, "fp32_precision") else ("allow_tf32", False)
    before = getattr(settings, name)
    setattr(settings, name, full)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        setattr(settings, name, before)
