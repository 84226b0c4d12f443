"""The pytest plugin for ``--device NAME``: ``pytest_plugins = ["gradfree.testing.device"]`` in conftest.py."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device``."""
    parser.addoption(
        "--device",
        default="cpu",
        help="the device of the tests' models and batches, by default cpu",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check before the collection of tests that the device exists.

    Raises:
        pytest.UsageError: it is unknown or missing; the message is one line.
    """
    name = config.getoption("device")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise pytest.UsageError(f"--device {name} is not there: {str(error).partition(chr(10))[0]}") from error


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """The device of ``--device``."""
    return str(request.config.getoption("device"))
