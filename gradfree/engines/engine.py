"""The base class of engines."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from math import isfinite
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradfree.chains.chain import Chain, ChainGradients, Solver
from gradfree.chains.handle import Handle
from gradfree.chains.kinds import known_kinds
from gradfree.chains.memory import Memory
from gradfree.chains.report import Report, path_name
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.dry_runs.dry_run import Batch, dry_run
from gradfree.engines.discovery import Chains, alternatives, validate
from gradfree.engines.rank_segment import Neighbors
from gradfree.errors import ChainError
from gradfree.torchside.optimizer_steps import AfterStep, StepCounter
from gradfree.torchside.private import allow_repeated_backward
from gradfree.torchside.unsaved import unsaved_hooks
from gradfree.wording import did_you_mean, one

NOTHING_ATTACHED = "nothing is attached, autograd computes all gradients: "
"""Begins the note of an engine that leaves a whole model to autograd."""


@contextmanager
def named_baseline() -> Iterator[None]:
    """Context in which ``backprop``, the exact baseline of a comparison, does not warn that it attaches nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"Backprop: {NOTHING_ATTACHED}")
        yield


@dataclass(frozen=True, kw_only=True)
class Engine(Solver):
    """A gradient algorithm: turns the direct cotangents of a chain's states into gradients.

    Subclasses are frozen dataclasses whose fields are the options. They implement :meth:`gradients`, or derive
    from :class:`SweepEngine`. An engine stores nothing of a model and may be attached to several models.

    Raises:
        TypeError: an unknown option; the message lists the known ones.
    """

    worth_trying: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    """Options that ``gradfree advise`` tries on any model."""

    is_random: ClassVar[bool] = False
    """Whether the engine draws new random numbers in each pass, so that gradients differ from pass to pass."""

    def __new__(cls, *args: Any, **options: Any) -> Engine:
        """Raise for options that the engine does not have."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(options.keys() - set(known))
        if unknown or len(args) > sum(not f.kw_only for f in fields(cls)):
            what = f"no option {', '.join(map(repr, unknown))}" if unknown else "only options given by name"
            near = did_you_mean(unknown[0], known) if unknown else ""
            raise TypeError(f"{cls.__name__} takes {what}; its options are: {', '.join(known) or 'none'}.{near}")
        return super().__new__(cls)

    @classmethod
    def exact_ones(cls) -> Sequence[Engine]:
        """Return engines of this class that ``engine="auto"`` may try: by default none.

        In every pass their gradients must equal backpropagation's, to the engine's default tolerance for the dtype.
        They must not refuse a pass.
        """
        return ()

    def solves(self, kind: type[Site]) -> bool:
        """Return whether the engine can solve chains of ``kind``: by default all but those of single layers."""
        return not kind.of_layers

    @property
    def kinds(self) -> list[type[Site]]:
        """The kinds of chains that the engine can solve; the first kind that accepts a module is used."""
        return [kind for kind in known_kinds() if self.solves(kind)]

    def problems_on_ranks(self, count: int) -> Iterator[str]:
        """Yield why the engine cannot solve a chain that is spread over ``count`` ranks.

        An engine that implements :meth:`gradients_on_ranks` yields only problems with its options.
        """
        yield (
            "the engine cannot solve a chain that is split across ranks; 'backprop', 'highway_bp' and 'fixed_point' "
            "can. On several devices use DistributedDataParallel, or Lightning's strategy '<engine>_ddp'."
        )

    def gradients_on_ranks(self, chain: Chain, direct: Any, neighbors: Neighbors) -> ChainGradients:
        """Return the gradients of this rank's blocks; see :func:`gradfree.layer_parallel`.

        Called on every rank in the same passes. The rules of :meth:`gradients` apply.

        Args:
            chain: this rank's links.
            direct: the direct cotangents of their states. On all ranks but the last, the last one is zero and must not
                be used: the rank on the right sends the cotangent of that state.
            neighbors: messages to and from the adjacent ranks.
        """
        raise NotImplementedError

    def may_gain(self, report: Report) -> bool:
        """Return whether ``auto`` and ``gradfree advise`` try this engine on the chains of ``report``."""
        return True

    def validate(
        self,
        model: nn.Module,
        chains: Chains | None = None,
        *,
        residual: float | None = None,
        batch: Batch | None = None,
    ) -> Report:
        """Return whether the engine can be attached to ``model``, and to which chains; changes nothing.

        If the model only has chains for other engines, the notes name some of these engines.

        With ``batch`` the engine is attached and the model runs forward and backward once. The report then also has
        the residual path of every block and its share of the gradient, the pieces of a chain, which blocks run in
        batches, and the errors of the first training step. Weights, gradients, buffers, attributes and random states
        are restored. Effects of your hooks, and of engines on other chains, remain. Reentrant checkpoints in the model
        are not supported with ``batch``.

        Args:
            model: any module.
            chains: module paths of the chains: containers (``nn.Sequential``, ``nn.ModuleList``) of blocks, recurrent
                layers, or modules of a kind registered by :func:`gradfree.register_chain`. A list of paths in place of
                a path is a chain of these modules, in this order. By default all recurrent layers and all containers
                that look like chains.
            residual: the residual path of chains in depth, K = residual · I, for blocks that keep the state's shape
                but hide their graph, such as compiled blocks. If left out, it is read from the blocks' graphs.
            batch: the model's arguments: a tensor, a tuple of arguments, or a mapping of keyword arguments. The loss is
                the one that the model returns, as Hugging Face models do, or else a fixed weighted sum of its outputs.

        Raises:
            TypeError: ``model`` is not a module, or ``residual`` not a number.
            ValueError: ``residual`` is not finite.
            Exception: anything that the model itself raises on the batch.
        """
        if residual is not None and (isinstance(residual, bool) or not isinstance(residual, int | float)):
            raise TypeError(f"residual must be a number, the K of K = residual · I, not {residual!r}.")
        if residual is not None and not isfinite(residual):
            raise ValueError(f"residual must be finite, not {residual}.")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, not {one(type(model).__name__)}.")
        report = self.find(model, chains)
        for site in report.chains.values():
            site.declared = residual
            site.requires_residual = chains is not None or len(report.chains) == 1
        problems = [problem for site in report.chains.values() for problem in self.problems_with(site)]
        # Notes may read the weights, which lazy layers do not have yet.
        fine = report.ok and not problems
        notes = [note for site in report.chains.values() for note in self.notes_about(site)] if fine else []
        report = replace(report, problems=[*report.problems, *problems], notes=[*report.notes, *notes])
        if not report.ok and not report.chains:
            return replace(report, notes=[*report.notes, *alternatives(model, chains)])
        if batch is None or not report.ok or not report.chains:
            return report
        return dry_run(partial(self.attach, model, chains, residual=residual), model, batch, report.notes)

    def find(self, model: nn.Module, chains: Chains | None) -> Report:
        """Return the chains of ``model`` that the engine would be attached to, and the problems found.

        Args:
            model: as in :meth:`validate`.
            chains: as in :meth:`validate`.
        """
        return validate(model, chains, self.kinds)

    def problems_with(self, site: Site) -> Iterator[str]:
        """Yield why the engine cannot be attached to a chain, besides what prevents attaching any engine."""
        if self.loops is None:
            yield from site.problems_when_linearised()
        if not self.needs_residual or site.has_residual:
            return
        if site.hidden_gate:
            yield f"{path_name(site.path)}: {site.hidden_gate} {type(self).__name__} needs the gate."
        else:
            yield (
                f"{path_name(site.path)} has no gate that carries its state from step to step, which "
                f"{type(self).__name__} needs. Use the engine 'fixed_point' or 'truncated', 'dsf' with a number as "
                "feedback, or leave the chain out: chains=[...]."
            )

    def notes_about(self, site: Site) -> Iterator[str]:
        """Yield remarks about a chain for the report: by default none."""
        return iter(())

    def install(self, site: Site, attachment: Attachment) -> Sequence[Removable]:
        """Put the engine on one chain; return the hooks and other parts, to be removed by ``detach()``.

        Args:
            site: the chain.
            attachment: the engine on this chain, with the chain's memory.
        """
        parts = site.record(attachment)
        after_step = self.after_step(attachment.memory)
        learns = type(self).learn is not Solver.learn
        if after_step is None and not learns:
            return parts

        def after(blocks: Mapping[str, nn.Module], steps: int) -> None:
            attachment.taught.clear()
            if after_step is not None:
                after_step(blocks, steps)

        return [*parts, StepCounter(site.blocks, after, attachment.memory.of("steps"))]

    def after_step(self, memory: Memory) -> AfterStep | None:
        """Return a function to call after each step of the chain's optimizer; ``None``: nothing to do.

        Args:
            memory: the chain's memory, which lasts from pass to pass.
        """
        return None

    def attach(
        self,
        model: nn.Module,
        chains: Chains | None = None,
        *,
        residual: float | None = None,
        batched: Literal["auto"] | bool = "auto",
    ) -> Handle:
        """Let this engine compute the gradients of ``model``'s chains in every backward pass from now on.

        Use the handle as a context manager or call its ``detach()``.

        Args:
            model: as in :meth:`validate`.
            chains: as in :meth:`validate`.
            residual: as in :meth:`validate`.
            batched: whether equal blocks of an ``nn.Sequential`` run forward without a graph, with all their VJPs in
                one batch. "auto": if they support it and a cost rule says that it is faster. ``True``: always; the
                forward pass refuses blocks that do not support it. ``False``: never. The gradients are the same to
                rounding. :meth:`validate` with a batch says which blocks run so.

        Raises:
            ChainError: :meth:`validate` reports problems, or ``batched=True`` is given for a chain that does not
                support it; the model is unchanged then.
            ValueError: ``batched`` is not "auto", ``True`` or ``False``.
        """
        if batched not in ("auto", True, False):
            raise ValueError(f"batched must be 'auto', True or False, not {batched!r}.")
        report = self.validate(model, chains, residual=residual)
        problems = list(report.problems)
        others = [path for path, site in report.chains.items() if not (self.pulls_at_once and site.can_be_batched)]
        if batched is True and report.ok and (others or not report.chains):
            problems.append(
                "batched=True is for a whole nn.Sequential of blocks, under an engine whose VJPs run at once: not for "
                f"{others or 'this engine'}. Leave it out, name other chains, chains=[...], or put the blocks into "
                "a separate nn.Sequential."
            )
        if problems:
            lines = "\n".join(f"- {line}" for line in (*problems, *report.notes))
            raise ChainError(f"{type(self).__name__} cannot be attached to {type(model).__name__}:\n{lines}")
        if not report.chains:
            for note in report.notes:
                warnings.warn(f"{type(self).__name__}: {note}", stacklevel=2)
        else:
            allow_repeated_backward()
            if "torch._dynamo" in sys.modules:
                # Code that is already compiled would keep running without the engine.
                torch.compiler.reset()
        blocks = (block for site in report.chains.values() for block in site.blocks.values())
        inside = {module for block in blocks for module in block.modules()}
        outside = [module._parameters for module in model.modules() if module not in inside]
        buffers = [module._buffers for module in model.modules() if module._buffers]
        on = {
            path: Attachment(self, path, site.solved, outside, batched, buffers) for path, site in report.chains.items()
        }
        parts: list[Removable] = []
        with ExitStack() as undo:
            for path, site in report.chains.items():
                installed = [*self.install(site, on[path])]
                for part in installed:
                    undo.callback(part.remove)
                parts += installed
            parts += unsaved_hooks(part for part in parts if isinstance(part, RemovableHandle))
            undo.pop_all()
        return Handle(parts, report.chains, on)
