"""The page of architectures: what ``highway_bp`` makes of the gradients of each; takes five minutes.

python benchmarks/scripts/models_page.py --out docs/reference/models.md

The extra ``models`` brings transformers and timm.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
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
"""More sweeps than any chain has links: k = L."""

EXACT = 1e-9

_INTRODUCTION = """# Architectures

`highway_bp` on models of three libraries: whether its gradients are exact at k = L, and how close they are with
k = 0, 1 and 2. Made by `python benchmarks/scripts/models_page.py --out docs/reference/models.md` with {versions}: small
configurations, random weights, double precision, training mode.

- **k = L**: relative error of all gradients together, with as many iterations as the longest chain takes.
- **k = 0, 1, 2**: cosine with the exact gradients. After training it is another.
- **split**: blocks at which another chain starts ([why](../start/limits.md#where-a-chain-is-split)).

Chains are found without help, except a few that are named.

{exact} of {all} are exact.

| library | architecture | chains: blocks | split | k = L | k = 0 | k = 1 | k = 2 |
|---|---|---|---|---|---|---|---|
"""


def row(architecture: Architecture) -> tuple[bool, str]:
    """Try one architecture; tell whether it is exact, and return its row of the table.

    Raises:
        AssertionError: its gradients are wrong at k = L, or its loss is another.
    """
    start = f"| {architecture.library} | {architecture.name} |"
    model = architecture.made()
    expected = architecture.gradients(model)
    try:
        figures, chains = [], ""
        for k in (ENOUGH, 0, 1, 2):
            error, cosine, chains = _tried(architecture, model, expected, k)
            if k == ENOUGH and not error < EXACT:
                raise AssertionError(f"{architecture.name} of {architecture.library} is wrong at k = L: {error:.1e}")
            figures.append(f"{error:.0e}" if k == ENOUGH else f"{cosine:.3f}")
    except ChainError as error:
        _, *problems = str(error).splitlines()
        message = (problems[0].removeprefix("- ") if problems else str(error)).replace("|", "\\|")
        return False, f"{start} refused: {message} | | | | | |"
    return True, f"{start} {chains} | {' | '.join(figures)} |"


def page() -> str:
    """Try all architectures of the libraries that are installed; return the page.

    Raises:
        AssertionError: an engine's gradients are wrong.
    """
    rows, exact = [], 0
    with _quiet():
        for architecture in _installed():
            print(f"{architecture.library}: {architecture.name}", file=sys.stderr)
            good, line = row(architecture)
            rows.append(line)
            exact += good
    versions = ", ".join(f"{name} {version(name)}" for name in (*LIBRARIES, "torch") if _is_installed(name))
    return _INTRODUCTION.format(versions=versions, exact=exact, all=len(rows)) + "\n".join(rows) + "\n"


def _tried(
    architecture: Architecture, model: nn.Module, expected: Mapping[str, Tensor], k: int
) -> tuple[float, float, str]:
    engine = create_engine("highway_bp", iterations=k)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with engine.attach(model, architecture.chains) as handle:
            actual = architecture.gradients(model)
    zero = torch.zeros(1)
    names = expected.keys() | actual.keys()
    pairs = [(actual.get(n, zero), expected.get(n, zero)) for n in names]
    apart = sum(float((a - e).pow(2).sum()) for a, e in pairs) ** 0.5
    norms = [sum(float(pair[i].pow(2).sum()) for pair in pairs) ** 0.5 for i in (0, 1)]
    inner = sum(float((a * e).sum()) for a, e in pairs)
    sites = handle.chains.items()
    found = ", ".join(f"`{path or '(the model)'}`: {len(site.blocks)}" for path, site in sites)
    return (
        apart / norms[1],
        inner / (norms[0] * norms[1]),
        f"{found} | {sum(len(site.splits) for _, site in sites) or ''}",
    )


def _installed() -> Iterator[Architecture]:
    if _is_installed("torchvision"):
        torchvision()  # The others import it.
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
    """Keep the libraries from telling of configurations that nobody would train with."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write the page to")
    parser.parse_args().out.write_text(page(), encoding="utf-8")
