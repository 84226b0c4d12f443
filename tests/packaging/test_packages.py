"""What pyproject.toml lists to be installed is what there is."""

import sys

import pytest
from places import ROOT

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")


def test_every_room_is_installed():
    """setuptools cannot find packages under other names than their folders', so they are listed."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = [
        f"{prefix}{path.parent.relative_to(ROOT).as_posix().replace('/', '.')}"
        for folder, prefix in (
            ("gradfree", ""),
            *((name, "gradfree.") for name in ("algorithms", "benchmarks", "models")),
        )
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert listed == sorted(set(folders))
