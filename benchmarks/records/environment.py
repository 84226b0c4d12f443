"""Where a record comes from."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from typing import Any

import torch

import gradfree
from gradfree import checkout
from gradfree.cli import UsageError
from gradfree.devices.hardware import description, is_available

_CODE = ("--", "*.py", "pyproject.toml")
"""What results depend on: a run that adds to records in the checkout does not change the code that makes them."""


def environment(device: str) -> dict[str, Any]:
    """Return versions, machine and source of what runs here."""
    return {
        "gradfree": gradfree.__version__,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if (changes := _git("status", "--porcelain", *_CODE)) is None else bool(changes),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": description(device),
    }


def require(device: str) -> None:
    """Make sure that ``device`` is there.

    Raises:
        UsageError: it is not.
    """
    if not is_available(device):
        raise UsageError(f"torch finds no device {device!r} here; leave out --device {device}.")


@cache
def _git(*arguments: str) -> str | None:
    """Return what git says about the checkout; ``None`` if gradfree runs from none."""
    if not checkout.IS_CHECKOUT:
        return None
    try:
        done = subprocess.run(["git", "-C", str(checkout.ROOT), *arguments], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
