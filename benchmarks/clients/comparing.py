"""Train other programs with and without an engine, in turns, and record time, memory and losses.

Each script beside this file defines a training and calls :func:`compare`. ``make clients`` runs all of them.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import resource
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from math import floor, log10
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradfree.benchmarks.records.environment import environment

RECORDS = Path(__file__).parents[1] / "results" / "clients" / "records.csv"
WHOLE = "whole run"
MOST_DIGITS = 7
"""The precision of float32."""

SHOWN = (
    "{client}, {case}, {span}: {plain_s} s and {line_s} s, {gain}x ({gain_low} to {gain_high}); "
    "process {plain_mib} and {line_mib} MiB; {steps} losses equal to {digits} digits"
)

Training = Callable[[], Any]
"""Trains; may return a dictionary with the seconds of parts of the training."""


@dataclass(frozen=True)
class Case:
    """A training, and the line that adds the engine.

    Attributes:
        name: description of the model.
        line: the line.
        steps: approximate number of optimizer steps.
        options: further options of ``prepare``.
    """

    name: str
    line: str
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One run: seconds by part, the process's peak memory in MiB, and the loss of each step."""

    seconds: Mapping[str, float]
    peak: float
    losses: Sequence[float]


def noisy_sine(length: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a time series to forecast."""
    return np.sin(np.arange(length) / 20) + np.random.default_rng(0).standard_normal(length) / 10


def compare(client: str, cases: Sequence[Case], prepare: Callable[..., Training]) -> None:
    """Run the command line of a script.

    Args:
        client: name of the package.
        cases: the trainings.
        prepare: takes ``with_line``, ``steps`` and a case's options, creates data and model, and returns a function
            that trains.
    """
    parser = argparse.ArgumentParser(description=f"{client} with and without an engine, in turns.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, help="run this many steps and one round as a test; no record")
    parser.add_argument("--records", type=Path, default=RECORDS, help="a CSV file")
    options = parser.parse_args()
    for case in cases:
        steps, rounds = (options.steps, 1) if options.steps else (case.steps, options.rounds)
        turns: dict[bool, list[Turn]] = {False: [], True: []}
        for _ in range(rounds):
            for with_line in turns:
                # A new process for each run, since the peak is the process's.
                with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
                    turn = process.submit(take_turn, prepare, with_line, steps, case.options, options.threads)
                    turns[with_line].append(turn.result())
        rows = [row(client, case, span, turns, options.threads) for span in turns[False][0].seconds]
        for found in rows:
            print(SHOWN.format(**found), flush=True)
        if not options.steps:
            keep(rows, options.records)


def take_turn(
    prepare: Callable[..., Training], with_line: bool, steps: int, options: Mapping[str, Any], threads: int
) -> Turn:
    """Train once, in this process."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    losses: list[Tensor] = []
    backward = Tensor.backward

    def record_loss(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss.detach())
        backward(loss, *args, **kwargs)

    with TemporaryDirectory() as folder:
        # Libraries write into the current folder.
        os.chdir(folder)
        train = prepare(with_line=with_line, steps=steps, **options)
        Tensor.backward = record_loss  # type: ignore[method-assign, assignment]
        start = perf_counter()
        parts = train()
        seconds = {WHOLE: perf_counter() - start, **(parts if isinstance(parts, dict) else {})}
        os.chdir("/")
    return Turn(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, [loss.item() for loss in losses])


def row(client: str, case: Case, span: str, turns: Mapping[bool, Sequence[Turn]], threads: int) -> dict[str, Any]:
    """Return the record of a case and a part of its runs."""
    pairs = list(zip(turns[False], turns[True], strict=True))
    seconds = {line: median(turn.seconds[span] for turn in taken) for line, taken in turns.items()}
    peaks = {line: median(turn.peak for turn in taken) for line, taken in turns.items()}
    gains = [plain.seconds[span] / line.seconds[span] for plain, line in pairs]
    here = environment("cpu")
    return {
        "client": client,
        "version": version(client),
        "case": case.name,
        "line": case.line,
        "span": span,
        "plain_s": round(seconds[False], 3),
        "line_s": round(seconds[True], 3),
        "gain": round(median(gains), 3),
        "gain_low": round(min(gains), 3),
        "gain_high": round(max(gains), 3),
        "plain_mib": round(peaks[False]),
        "line_mib": round(peaks[True]),
        "digits": min(digits(plain.losses, line.losses) for plain, line in pairs),
        "rounds": len(pairs),
        "threads": threads,
        "steps": len(pairs[0][0].losses),
        "gradfree": here["gradfree"],
        "commit": here["commit"],
        "torch": here["torch"],
        "cpu": here["instructions"],
        "date": date.today().isoformat(),
    }


def digits(a: Sequence[float], b: Sequence[float]) -> int:
    """Return the number of digits to which all losses agree."""
    difference = max(abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0 for x, y in zip(a, b, strict=True))
    return min(MOST_DIGITS, floor(-log10(difference))) if difference else MOST_DIGITS


def keep(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the rows to the file; they replace rows of the same case, part and number of threads."""
    kept: dict[tuple[str, ...], Mapping[str, Any]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = {_key(old): old for old in csv.DictReader(file)}
    kept |= {_key(new): new for new in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept[key] for key in sorted(kept))


def _key(found: Mapping[str, Any]) -> tuple[str, ...]:
    return found["client"], found["case"], found["span"], str(found["threads"])
