"""Write the page of architectures: the accuracy of ``highway_bp``'s gradients on each; takes five minutes.

python benchmarks/scripts/models_page.py --out docs/reference/models.md

The extra ``models`` installs transformers and timm.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from architecture import Architecture
from image_models import timm_models, torchvision, torchvision_models
from torch import Tensor, nn
from transformers_models import transformers_models

from gradfree.errors import ChainError
from gradfree.registry import create_engine

LIBRARIES: dict[str, Callable[[], list[Architecture]]] = {
    "transformers": transformers_models,
    "timm": timm_models,
    "torchvision": torchvision_models,
}
ENOUGH = 10**6
"""More iterations than any chain has links, so that gradients are exact."""

EXACT = 1e-9

_INTRODUCTION = """# Architectures

`highway_bp` on models of three libraries: {exact} of {all} have exact gradients with as many iterations as the longest
chain has blocks (relative error below 1e-9). Made by
`python benchmarks/scripts/models_page.py --out docs/reference/models.md` with {versions}: small configurations, random
weights, double precision, training mode. Chains are found without help, except a few that are named.

Each table sorts a library's models by the cosine between exact gradients and those of two iterations. After training
it is another.
"""
_ITERATIONS = 2
_LEAST = {"0.99 and more": 0.99, "0.9 to 0.99": 0.9, "less": -1.0}
"""Groups of the table by minimal cosine, highest first."""


def row(architecture: Architecture) -> tuple[float | None, str]:
    """Try one architecture; return the cosine of two iterations, or ``None`` and why the engine refuses it.

    Raises:
        AssertionError: its gradients are wrong with enough iterations.
    """
    model = architecture.made()
    expected = architecture.gradients(model)
    try:
        error, _ = _errors(architecture, model, expected, ENOUGH)
        if not error < EXACT:
            raise AssertionError(f"{architecture.name} of {architecture.library} is wrong at k = L: {error:.1e}")
        return _errors(architecture, model, expected, _ITERATIONS)[1], ""
    except ChainError as error:
        _, *problems = str(error).splitlines()
        return None, problems[0].removeprefix("- ") if problems else str(error)


def page() -> str:
    """Try all architectures of the installed libraries; return the page.

    Raises:
        AssertionError: an engine's gradients are wrong.
    """
    rows = []
    with _quiet():
        for architecture in _installed():
            print(f"{architecture.library}: {architecture.name}", file=sys.stderr)
            rows.append((architecture.library, architecture.name, *row(architecture)))
    versions = ", ".join(f"{name} {version(name)}" for name in (*LIBRARIES, "torch") if _is_installed(name))
    return written(rows, versions)


def written(rows: Sequence[tuple[str, str, float | None, str]], versions: str) -> str:
    """Return the page for rows of library, architecture, cosine and refusal."""
    exact = sum(cosine is not None for _, _, cosine, _ in rows)
    lines = [_INTRODUCTION.format(versions=versions, exact=exact, all=len(rows))]
    for library in dict.fromkeys(row[0] for row in rows):
        lines += [f"## {library}", "", "| cosine | models |", "|---|---|"]
        names: dict[str, list[str]] = {group: [] for group in _LEAST}
        for _, name, cosine, _ in (row for row in rows if row[0] == library):
            if cosine is not None:
                names[next(group for group, least in _LEAST.items() if cosine >= least)].append(f"`{name}`")
        lines += [f"| {group} | {', '.join(found)} |" for group, found in names.items()]
        lines += [""]
    refused = [f"- `{name}` of {library}: {why}" for library, name, cosine, why in rows if cosine is None]
    return "\n".join([*lines, "## Refused", "", *refused, ""])


def _errors(
    architecture: Architecture, model: nn.Module, expected: Mapping[str, Tensor], k: int
) -> tuple[float, float]:
    """Return the relative error of the whole gradient, and its cosine with the exact one."""
    engine = create_engine("highway_bp", iterations=k)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with engine.attach(model, architecture.chains):
            actual = architecture.gradients(model)
    zero = torch.zeros(1)
    pairs = [(actual.get(n, zero), expected.get(n, zero)) for n in expected.keys() | actual.keys()]
    distance = sum(float((a - e).pow(2).sum()) for a, e in pairs) ** 0.5
    norms = [sum(float(pair[i].pow(2).sum()) for pair in pairs) ** 0.5 for i in (0, 1)]
    inner = sum(float((a * e).sum()) for a, e in pairs)
    return distance / norms[1], inner / (norms[0] * norms[1])


def _installed() -> Iterator[Architecture]:
    if _is_installed("torchvision"):
        torchvision()  # First, since the others import it.
    for name, models in LIBRARIES.items():
        if _is_installed(name):
            yield from models()


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries' warnings about unusual configurations."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write the page to")
    parser.parse_args().out.write_text(page(), encoding="utf-8")
