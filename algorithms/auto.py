"""Finds the fastest of the exact engines during training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from gradfree.algorithms.backprop import Backprop
from gradfree.algorithms.newton import Newton
from gradfree.algorithms.shooting import Shooting
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.handle import Handle
from gradfree.chains.report import Report
from gradfree.choosing.switching import SwitchingHandle
from gradfree.dry_runs.dry_run import Batch
from gradfree.engines.discovery import Chains
from gradfree.engines.engine import Engine
from gradfree.errors import ChainError
from gradfree.loops.recurrence import Runner
from gradfree.registry import engine_class, list_engines
from gradfree.scans.rules import LoopRule
from gradfree.scans.segmented_loop import run_loop

PLAIN = Backprop(plain=True)
_ALL_WAYS = LoopRule(Shooting().rule, Newton().options)


@dataclass(frozen=True, kw_only=True)
class Auto(Engine):
    """The fastest engine with exact gradients: all of them take turns in the first steps, then the fastest stays.

    This is like cuDNN's benchmark mode for convolutions. Autograd is a candidate, so only the turns cost time; the
    first candidate is ``backprop``. Every step trains with exact gradients. The next turn begins after a step of an
    optimizer that has weights of the chains, as long as the handle exists. Each engine has nine steps; times are
    those of whole steps, from one optimizer step to the next. Checkpoints contain the choice, and a resumed run does
    not time again. Each rank of data parallel training chooses for itself.

    In :func:`gradfree.scan` the candidates are the plain loop, segments, compiled chunks with ``compile=True``, and
    Newton's method for carries of up to eight numbers a row.

    The candidates are all engines that :meth:`~gradfree.Engine.exact_ones` returns. A pass that one of them refuses is
    refused here, too: second derivatives, cells with random numbers.
    """

    worth_trying: ClassVar = ()

    @property
    def engines(self) -> list[Engine]:
        """The candidates for any model; ``backprop`` is the first."""
        others = (kind for name in list_engines() if (kind := engine_class(name)) is not Backprop)
        kinds: list[type[Engine]] = [Backprop, *others]
        return [engine for kind in kinds for engine in kind.exact_ones()]

    @property
    def loops(self) -> Runner:
        """Any step function by the fastest way: its own loop, segments, or Newton's method for narrow carries."""
        return partial(run_loop, _ALL_WAYS)

    def outputs_within(self, dtype: torch.dtype) -> float:
        """Return the largest value of all candidates."""
        return max(engine.outputs_within(dtype) for engine in self.engines)

    def validate(
        self,
        model: nn.Module,
        chains: Chains | None = None,
        *,
        residual: float | None = None,
        batch: Batch | None = None,
    ) -> Report:
        """Return the chains of all engines that can be attached, or else the problems of the first engine.

        With ``batch`` each engine makes a dry run.
        """
        return _joined({e: e.validate(model, chains, residual=residual, batch=batch) for e in self.engines})

    def attach(
        self,
        model: nn.Module,
        chains: Chains | None = None,
        *,
        residual: float | None = None,
        batched: Literal["auto"] | bool = "auto",
    ) -> Handle:
        """Let all engines that can be attached to ``model`` take turns."""
        reports = {engine: engine.validate(model, chains, residual=residual) for engine in self.engines}
        joined = _joined(reports)
        if not joined.ok:
            problems = "\n".join(f"- {problem}" for problem in joined.problems)
            raise ChainError(f"Auto cannot be attached to {type(model).__name__}:\n{problems}")
        if not joined.chains:
            warnings.warn(f"Auto: {joined.notes[0]}", stacklevel=2)
        candidates = {
            _short(engine): partial(engine.attach, model, chains, residual=residual, batched=batched)
            for engine in _fit(reports)
        }
        blocks = {path: block for site in joined.chains.values() for path, block in site.blocks.items()}
        return SwitchingHandle(candidates, blocks or {"": model})

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the exact gradients of a chain that was recorded for ``Auto`` itself."""
        return chain.backpropagate(direct)


def _joined(reports: dict[Engine, Report]) -> Report:
    """Return one report of all engines that can be attached; if none has a chain, the first engine's report."""
    fit = _fit(reports)
    chains = {path: site for engine in reversed(fit) for path, site in reports[engine].chains.items()}
    if not chains:
        # Backprop(plain=True) always fits but has no chain. The first report says why the others do not fit.
        return next(iter(reports.values()))
    findings = {path: found for engine in reversed(fit) for path, found in reports[engine].findings.items()}
    return Report(chains, (), [f"these take turns over the first steps: {', '.join(map(_short, fit))}"], findings)


def _fit(reports: dict[Engine, Report]) -> Sequence[Engine]:
    """Return the engines that have a chain on which they may gain, and autograd."""
    return [
        engine
        for engine, report in reports.items()
        if report.ok and (report.chains or engine == PLAIN) and engine.may_gain(report)
    ]


def _short(engine: Engine) -> str:
    """Return the call that creates the engine, without options at their defaults."""
    given = {f.name: value for f in fields(engine) if (value := getattr(engine, f.name)) != f.default}
    return f"{type(engine).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"
