"""``gradfree fit``, ``validate`` and ``test``; light to import, as every ``gradfree`` command imports it."""

from __future__ import annotations

from gradfree.extras import needs_extra


def fit(*arguments: str) -> None:
    """Train a model with an engine, in Lightning."""
    _run("fit", arguments)


def validate(*arguments: str) -> None:
    """Score a trained model on validation data, in Lightning."""
    _run("validate", arguments)


def test(*arguments: str) -> None:
    """Score a trained model on test data, in Lightning."""
    _run("test", arguments)


def _run(command: str, arguments: tuple[str, ...]) -> None:
    with needs_extra("bench"):
        from gradfree.benchmarks.fit.command_line import run

    run(command, arguments)
