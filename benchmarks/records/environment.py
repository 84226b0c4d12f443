"""The environment in which a record is made."""

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
"""The files that count as code: a run that adds records to the checkout does not make it dirty."""


def environment(device: str) -> dict[str, Any]:
    """Return the versions, the commit and the machine of this process."""
    return {
        "gradfree": gradfree.__version__,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if (changes := _git("status", "--porcelain", *_CODE)) is None else bool(changes),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": description(device),
    }


def require(device: str) -> None:
    """Raise if ``device`` is not available.

    Raises:
        UsageError: it is not available.
    """
    if not is_available(device):
        raise UsageError(f"torch finds no device {device!r} here; leave out --device {device}.")


@cache
def _git(*arguments: str) -> str | None:
    """Return git's output for the checkout; ``None`` if gradfree does not run from one."""
    if not checkout.IS_CHECKOUT:
        return None
    try:
        done = subprocess.run(["git", "-C", str(checkout.ROOT), *arguments], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
