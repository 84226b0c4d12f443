"""The engine interface: a configuration that knows how to solve a chain for its gradients."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradfree.chains.bypass import BypassWatch
from gradfree.chains.chain import Chain, ChainGradients, Solver
from gradfree.chains.handle import Handle
from gradfree.chains.kinds import known_kinds
from gradfree.chains.memory import Memory
from gradfree.chains.neighbors import Neighbors
from gradfree.chains.report import Report
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.engines.discovery import Chains, alternatives, compiled_around_blocks, validate
from gradfree.errors import ChainError
from gradfree.torchside.optimizer_steps import AfterStep, StepCounter
from gradfree.torchside.unsaved import unsaved_hooks
from gradfree.trial.dry_run import Batch, dry_run
from gradfree.wording import one


@dataclass(frozen=True, kw_only=True)
class Engine(Solver):
    """A way to train a network: turns the direct cotangents of a chain's states into gradients.

    Subclasses are frozen dataclasses whose fields are the options; they implement :meth:`gradients`, or derive
    from :class:`SweepEngine`. An engine holds no state of a model and may be attached to several.

    Raises:
        TypeError: an unknown option; the message names the known ones.
    """

    worth_trying: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    """Options that ``gradfree advise`` tries on a model that nothing is known of."""

    def __new__(cls, *args: Any, **options: Any) -> Engine:
        """Refuse options that the engine does not have."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(options.keys() - set(known))
        if unknown or len(args) > sum(not f.kw_only for f in fields(cls)):
            what = f"no option {', '.join(map(repr, unknown))}" if unknown else "only options given by name"
            raise TypeError(f"{cls.__name__} takes {what}; its options are: {', '.join(known) or 'none'}.")
        return super().__new__(cls)

    @classmethod
    def exact_ones(cls) -> Sequence[Engine]:
        """Return the engine with the options with which ``engine="auto"`` may take it for backpropagation: here, none.

        In every pass the gradient must be backpropagation's, to what the engine takes for that in the states'
        precision; none may be refused.
        """
        return ()

    def solves(self, kind: type[Site]) -> bool:
        """Return whether the engine can solve chains of ``kind``: here, of any links that are not to be taken apart."""
        return not kind.of_layers

    @property
    def kinds(self) -> list[type[Site]]:
        """The kinds of chains that the engine can solve; the first that accepts a module counts."""
        return [kind for kind in known_kinds() if self.solves(kind)]

    @property
    def keeps_means(self) -> bool:
        """Whether the engine asks for a chain's ``mean_residual``, which ranks average."""
        return False

    @property
    def is_random(self) -> bool:
        """Whether the engine draws random numbers in each pass, so that no two passes have the same gradients."""
        return False

    def problems_on_ranks(self, count: int) -> Iterator[str]:
        """Yield why the engine cannot solve a chain whose runs of blocks lie on ``count`` ranks.

        One that can has :meth:`gradients_on_ranks`, and yields what its options do not go with.
        """
        yield (
            "the engine solves chains that are whole on each rank: across ranks there are 'backprop', 'highway_bp' and "
            "'fixed_point'. On several devices use DistributedDataParallel, or Lightning's strategy '<engine>_ddp'."
        )

    def gradients_on_ranks(self, chain: Chain, direct: Any, neighbors: Neighbors) -> ChainGradients:
        """Return the gradients of this rank's run of blocks; see :func:`gradfree.layer_parallel`.

        Called on every rank of ``neighbors``, in the same passes. What :meth:`gradients` has to keep holds here, too.

        Args:
            chain: the rank's own links.
            direct: the direct cotangents of their states. The last one is of no use where the chain goes on to the
                right: it is zero, and its cotangent comes from there.
            neighbors: the ranks beside this one.
        """
        raise NotImplementedError

    def validate(
        self,
        model: nn.Module,
        chains: Chains | None = None,
        *,
        residual: float | None = None,
        batch: Batch | None = None,
    ) -> Report:
        """Return whether the engine can be attached to ``model``, and to which chains; changes nothing.

        Where the model has chains for other engines only, the notes name some of those.

        With a batch the model runs forward and backward once, with the engine on it: then the report also has, of
        every block, what its residual path is read as and how much of the gradient that carries, the pieces of a chain,
        what is done in batches, and what the first training step would be refused for. Weights, gradients,
        buffers, attributes and random states are afterwards as before; what hooks of yours and engines on other chains
        do, they do once more. Reentrant checkpoints cannot be in the model then.

        Args:
            model: any module.
            chains: module paths of the chains: containers (``nn.Sequential``, ``nn.ModuleList``) of blocks, recurrent
                layers, or whatever :func:`gradfree.register_chain` has made known; or a list of paths for a chain of
                these modules, in this order. By default all recurrent layers and all containers that look like chains.
            residual: the residual path of chains in depth, K = residual · I, where a block keeps the state's shape: for
                blocks that hide it, as compiled ones do. Left out, it is read off their graphs.
            batch: what the model is given: a tensor, a tuple of its arguments, or a mapping of those by keyword. The
                loss is the one that it returns, as models of Hugging Face do, or a fixed sum over what it returns.

        Raises:
            TypeError: ``model`` is no module, or ``residual`` no number.
            Exception: whatever the model itself raises on the batch.
        """
        if residual is not None and (isinstance(residual, bool) or not isinstance(residual, int | float)):
            raise TypeError(f"residual must be a number, the K of K = residual · I, not {residual!r}.")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, not {one(type(model).__name__)}.")
        report = self.find(model, chains)
        for site in report.chains.values():
            site.declared = residual
            site.requires_residual = chains is not None or len(report.chains) == 1
        report = self.judge(model, report)
        if not report.ok and not report.chains:
            return replace(report, notes=[*report.notes, *alternatives(model, chains, self.kinds)])
        if batch is None or not report.ok or not report.chains:
            return report
        return dry_run(partial(self.attach, model, chains, residual=residual), model, batch, report.notes)

    def find(self, model: nn.Module, chains: Chains | None) -> Report:
        """Return the chains of ``model`` that the engine would be attached to, and what stands in the way.

        Args:
            model: as in :meth:`validate`.
            chains: likewise.
        """
        return validate(model, chains, self.kinds)

    def judge(self, model: nn.Module, report: Report) -> Report:
        """Return ``report`` with what this engine, of all that solve such chains, has to say about them.

        Args:
            model: as in :meth:`validate`.
            report: the chains that were found.
        """
        if not self.needs_residual:
            return report
        problems = [
            f"{path!r} has no gate that carries its state from step to step, which {type(self).__name__} needs. "
            "Use the engine 'fixed_point', 'truncated' or 'dsf', or leave it out: chains=[...]."
            for path, site in report.chains.items()
            if not site.has_residual
        ]
        problems += [
            f"{where} is compiled, which hides the residual path of the blocks in {path!r} that "
            f"{type(self).__name__} needs. Compile what lies inside the blocks, declare the path, "
            "attach(..., residual=1.0), or use the engine 'fixed_point' or 'truncated'."
            for path, site in report.chains.items()
            if site.declared is None and (where := compiled_around_blocks(model, site))
        ]
        return Report(report.chains, [*report.problems, *problems])

    def install(self, site: Site, attachment: Attachment) -> Sequence[Removable]:
        """Put the engine on one chain; return what to take off again.

        Args:
            site: the chain.
            attachment: the engine on it, with what is kept of it from pass to pass.
        """
        parts = site.record(attachment)
        after_step = self.after_step(attachment.memory)
        if after_step is None:
            return parts
        return [*parts, StepCounter(site.blocks, after_step, attachment.memory.of("steps"))]

    def after_step(self, memory: Memory) -> AfterStep | None:
        """Return what is to be done on one chain after each step of its optimizer; ``None``: nothing.

        Args:
            memory: what is kept of the chain from pass to pass.
        """
        return None

    def attach_report(
        self,
        model: nn.Module,
        chains: Chains | None = None,
        *,
        residual: float | None = None,
        batched: Literal["auto"] | bool = "auto",
    ) -> Report:
        """Tell, as :meth:`validate` does, whether :meth:`attach` would attach with these arguments.

        Raises:
            ValueError: another ``batched``.
        """
        if batched not in ("auto", True, False):
            raise ValueError(f"batched must be 'auto', True or False, not {batched!r}.")
        report = self.validate(model, chains, residual=residual)
        unfit = () if batched is not True else _batched_problems(report, self)
        return replace(report, problems=[*report.problems, *unfit])

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
            chains: likewise.
            residual: as in :meth:`validate`.
            batched: whether equal blocks of an ``nn.Sequential`` run forward without a graph and are pulled through in
                one batch: "auto", where they can and a rule of thumb says that it pays; never; or always: the forward
                pass refuses blocks that cannot. The gradients are the same to rounding. :meth:`validate` with a batch
                tells which blocks do.

        Raises:
            ChainError: what :meth:`validate` reports, ``batched=True`` for another chain; the model is unchanged then.
            ValueError: another ``batched``.
        """
        report = self.attach_report(model, chains, residual=residual, batched=batched)
        if not report.ok:
            lines = "\n".join(f"- {line}" for line in (*report.problems, *report.notes))
            raise ChainError(f"{type(self).__name__} cannot be attached to {type(model).__name__}:\n{lines}")
        if not report.chains:
            for note in report.notes:
                warnings.warn(f"{type(self).__name__}: {note}", stacklevel=2)
        elif "torch._dynamo" in sys.modules:
            # What it has compiled would run on without the engine.
            torch.compiler.reset()
        blocks = (block for site in report.chains.values() for block in site.blocks.values())
        inside = {module for block in blocks for module in block.modules()}
        outside = [module._parameters for module in model.modules() if module not in inside]
        on = {path: Attachment(self, path, site.solved, outside, batched) for path, site in report.chains.items()}
        parts = [part for path, site in report.chains.items() for part in self.install(site, on[path])]
        parts += unsaved_hooks(part for part in parts if isinstance(part, RemovableHandle))
        kept = report.chains.items() if self.keeps_means else ()
        means = [(on[path].memory, name, shape) for path, site in kept for name, shape in site.means().items()]
        return Handle(parts, report.chains, on, means, BypassWatch(report.chains))


def _batched_problems(report: Report, engine: Engine) -> Iterator[str]:
    if report.ok and not (engine.pulls_at_once and report.chains):
        yield (
            f"batched=True is for chains whose VJPs run at once, which {type(engine).__name__} does not do. "
            "Leave it out."
        )
        return
    for path, site in report.chains.items():
        if not site.can_be_batched:
            yield f"{path!r} is no nn.Sequential of blocks: batched=True is for those. Leave it out, or name others."
