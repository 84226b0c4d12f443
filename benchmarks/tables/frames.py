"""Polars, imported on first use: a machine that only runs cases does not need it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gradfree.extras import needs_extra

__all__ = ["pl"]

if TYPE_CHECKING:
    import polars as pl
else:

    class _Polars:
        def __getattr__(self, name: str) -> Any:
            with needs_extra("bench"):
                return getattr(import_module("polars"), name)

    pl = _Polars()
