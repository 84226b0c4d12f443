"""The fastest of the exact engines, found out in training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from gradfree.algorithms.backprop import Backprop
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.handle import Handle
from gradfree.chains.report import Report
from gradfree.choosing.switching import Candidate, SwitchingHandle
from gradfree.choosing.turns import ROUNDS
from gradfree.engines.discovery import Chains
from gradfree.engines.engine import Engine
from gradfree.errors import ChainError
from gradfree.registry import engine_class, list_engines
from gradfree.torchside.private import is_compiled
from gradfree.trial.dry_run import Batch

PLAIN = Backprop(plain=True)


@dataclass(frozen=True, kw_only=True)
class Auto(Engine):
    """The fastest of the engines with exact gradients: they take turns over the first steps, the fastest stays.

    As cuDNN's benchmark mode does for convolutions. Plain backpropagation is among them, so that nothing is lost but
    turns; the engine ``backprop`` is the first. Every step is one of training with exact gradients, whoever's turn it
    is. Turns change behind steps of an optimizer that holds weights of the chains, as long as the handle is kept; each
    engine has twelve steps, which are timed whole, from one step of the optimizer to the next. The choice is kept in
    checkpoints; a run that is resumed from one times nothing again. Ranks that train together agree in Lightning and
    Fabric; elsewhere by ``average_over_ranks()`` of the handle, or each chooses for itself.

    Of all engines those take part that say so: :meth:`~gradfree.Engine.exact_ones`. A pass that one of them refuses,
    second derivatives or a cell with random numbers, is refused here, too.
    """

    worth_trying: ClassVar = ()

    @property
    def engines(self) -> list[Engine]:
        """The engines that take part, wherever they fit; backpropagation is the first."""
        others = (kind for name in list_engines() if (kind := engine_class(name)) is not Backprop)
        kinds: list[type[Engine]] = [Backprop, *others]
        return [engine for kind in kinds for engine in kind.exact_ones()]

    def outputs_within(self, dtype: torch.dtype) -> float:
        """Return the most that one of them says."""
        return max(engine.outputs_within(dtype) for engine in self.engines)

    def validate(
        self,
        model: nn.Module,
        chains: Chains | None = None,
        *,
        residual: float | None = None,
        batch: Batch | None = None,
    ) -> Report:
        """Tell the chains of all engines that fit, with a batch by dry runs, or what stands in the first's way."""
        return _joined({e: e.validate(model, chains, residual=residual, batch=batch) for e in self.engines})

    def attach(
        self,
        model: nn.Module,
        chains: Chains | None = None,
        *,
        residual: float | None = None,
        batched: Literal["auto"] | bool = "auto",
    ) -> Handle:
        """Let engines take turns on ``model``, of those that :meth:`Engine.attach` would attach."""
        options: dict[str, Any] = {"residual": residual, "batched": batched}
        reports = {engine: engine.attach_report(model, chains, **options) for engine in self.engines}
        joined = _joined(reports)
        if not joined.ok:
            problems = "\n".join(f"- {problem}" for problem in joined.problems)
            raise ChainError(f"Auto cannot be attached to {type(model).__name__}:\n{problems}")
        if not joined.chains:
            warnings.warn(f"Auto: {joined.notes[0]}", stacklevel=2)
        candidates = []
        for engine in _distinct(reports):
            # An engine without a chain here would warn at each of its turns: PLAIN does the same without a warning.
            attach = (engine if reports[engine].chains else PLAIN).attach
            candidates.append(Candidate(_short(engine), partial(attach, model, chains, **options)))
        blocks = {path: block for site in joined.chains.values() for path, block in site.blocks.items()}
        # A change of engines compiles again.
        rounds = 1 if any(is_compiled(module) for module in model.modules()) else ROUNDS
        return SwitchingHandle(candidates, blocks or {"": model}, rounds)

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the exact gradients of a chain that was recorded for no engine in particular."""
        return chain.backpropagate(direct)


def _joined(reports: dict[Engine, Report]) -> Report:
    fit = _distinct(reports)
    chains = {path: site for engine in reversed(fit) for path, site in reports[engine].chains.items()}
    if not chains:
        # An engine that attaches to nothing always fits: the first says why the others do not.
        return next(iter(reports.values()))
    findings = {path: found for engine in reversed(fit) for path, found in reports[engine].findings.items()}
    return Report(chains, (), [f"these take turns over the first steps: {', '.join(map(_short, fit))}"], findings)


def _distinct(reports: dict[Engine, Report]) -> Sequence[Engine]:
    """Return the engines that fit; of those that leave all to autograd the first."""
    fit = [engine for engine, report in reports.items() if report.ok]
    plain = [engine for engine in fit if not reports[engine].chains]
    return [engine for engine in fit if engine not in plain[1:]]


def _short(engine: Engine) -> str:
    """Return how to make the engine, without what is so anyway."""
    given = {f.name: value for f in fields(engine) if (value := getattr(engine, f.name)) != f.default}
    return f"{type(engine).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"
