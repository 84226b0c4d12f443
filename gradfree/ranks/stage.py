"""One rank's part of a model whose blocks lie on several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from gradfree.algebra.cotangents import Cotangent
from gradfree.chains.chain import ChainGradients
from gradfree.chains.kinds import known_kinds
from gradfree.chains.site import Site
from gradfree.depth.chain import DepthChain
from gradfree.depth.ports import port_of
from gradfree.engines.discovery import Chains, validate
from gradfree.engines.engine import Engine
from gradfree.errors import ChainError
from gradfree.ranks.absent import Left, stand_in, vacate
from gradfree.ranks.messages import Messages, check_tags, group_of
from gradfree.ranks.microbatches import Cutter, joined
from gradfree.ranks.on_rank import OnRank
from gradfree.ranks.outputs import AllOutputs, compare_loss
from gradfree.ranks.placement import Placement, place
from gradfree.ranks.rank_pass import RankPass
from gradfree.ranks.shared import shared_weights
from gradfree.ranks.whole import Whole
from gradfree.registry import resolve_engine
from gradfree.torchside.guards import refuse_transforms
from gradfree.torchside.private import checkpointed, recomputed


def layer_parallel(
    model: nn.Module,
    engine: str | Engine = "highway_bp",
    *,
    mesh: DeviceMesh | distributed.ProcessGroup | None = None,
    chains: Chains | None = None,
    costs: Sequence[float] | None = None,
    first: Sequence[str] = (),
    last: Sequence[str] = (),
    taps: Sequence[str] = (),
    residual: float | None = None,
    microbatches: int = 1,
    uncut: Sequence[str] = (),
    **options: Any,
) -> Stage:
    """Leave of ``model`` what this rank is to hold: one run of blocks, on the first and the last rank what is around.

    Called on every rank of the group with the same model, before its optimizer is made: ``model.parameters()`` are then
    the rank's own. The training loop stays as it is, the same on all ranks with the same batches: ``model(x)`` returns
    the same outputs everywhere, ``loss.backward()`` solves all ranks' runs at once. ``papers/segments.md``, section 4;
    multiple shooting (Bock & Plitt 1984) with Highway-BP (arXiv 2501.17086) across the borders; exact at
    ``iterations`` of the number of ranks less one.

    Args:
        model: any module with a chain of blocks, changed in place.
        engine: "highway_bp", "fixed_point" or "backprop", or such an engine.
        mesh: the ranks, in the order of the blocks: a dimension of a ``DeviceMesh``, a process group; by default all.
        chains: as in :meth:`gradfree.Engine.validate`, the one chain whose blocks go to ranks; by default it is found.
        costs: of each block, such as its measured time; by default its number of parameters. Runs are balanced by them.
        first: paths of modules or parameters that the first rank holds; by default what comes before the blocks in
            ``model.named_modules()``.
        last: likewise of the last rank; by default all else.
        taps: paths of blocks whose output the model also uses behind the chain; over gloo alone.
        residual: as in :meth:`gradfree.Engine.attach`.
        microbatches: m, the parts that each batch is cut into along the first dimension of the tensors that the model
            is given; ranks work on them at the same time, so that a forward pass takes (n + m - 1) / (n m) of one
            process's time. Smaller batches are cut into single samples.
        uncut: the names of arguments of the model's ``forward`` that each part is given as they are, such as a mask for
            all samples.
        **options: the engine's options, if it is given by name.

    Returns:
        The rank's stage.

    Raises:
        ChainError: the engine, the model or the options cannot be; ranks differ in them.
    """
    if stage_of(model) is not None:
        raise ChainError("the model lies on ranks already: layer_parallel is called once for a model.")
    group = group_of(mesh)
    if taps:
        check_tags(group, model, "taps")
    cutter = Cutter(model.forward, microbatches, uncut)
    messages = Messages(group)
    solver = resolve_engine(engine, options)
    site = _site(model, solver, chains, residual, messages.count)
    placement = place(model, site, messages.count, costs, first, last)
    if unknown := [tap for tap in taps if tap not in placement.blocks]:
        raise ChainError(f"taps names {unknown[0]!r}, which is no block of {site.path!r}.")
    chosen = {"the engine": repr(solver), "the taps": list(taps), "microbatches": microbatches, "uncut": sorted(uncut)}
    messages.agree(chosen | _facts(model, placement))
    tapped = [placement.blocks.index(tap) for tap in taps]
    return Stage(model, solver, site, placement, messages, tapped, residual, cutter)


def stage_of(model: nn.Module) -> Stage | None:
    """Return what a model lies on ranks by, if it does."""
    host = getattr(model.forward, "__self__", None)
    return host if isinstance(host, Stage) else None


class Stage(Whole):
    """One rank's part of a model; see :func:`layer_parallel`, which makes it.

    Attributes:
        messages: the ranks.
        placement: what lies where.
        site: this rank's chain.
        taps: the indices of blocks whose outputs are used behind the chain.
        ports: of all blocks.
        gone: names of the weights that are not here, by the ids of what stands in their places.
        handle: the engine's on this rank's blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        site: Site,
        placement: Placement,
        messages: Messages,
        taps: Sequence[int],
        residual: float | None,
        cutter: Cutter,
    ):
        super().__init__(model, list(model.state_dict()), placement, messages)
        self.taps, self._cutter = taps, cutter
        blocks = list(site.blocks.values())
        self.ports = [port_of(block) for block in blocks]
        run = placement.runs[messages.position]
        own = list(site.blocks)[run.start : run.stop]
        self._shared = shared_weights(model, placement, messages)
        here = {module for block in blocks[run.start : run.stop] for module in block.modules()}
        everywhere = {module for block in blocks for module in block.modules()}
        held = {id(p) for name, p in model.named_parameters() if messages.position in placement.holders[name]}
        self.gone = vacate(model, held, everywhere - here)
        self._new: set[object] = set()
        self._passes = WeakTensorKeyDictionary()
        self._pass: RankPass | None = None
        self._number = 0
        name = f"{own[0]} to {own[-1]}, of rank {messages.position}"
        self.handle = OnRank(engine=engine, name=name, host=self).attach(model, [own], residual=residual)
        self.site = self.handle.chains[name]
        for index, block in enumerate(blocks):
            if index in run:
                block.register_forward_pre_hook(partial(self._begins, index), prepend=True, with_kwargs=True)
                block.register_forward_hook(partial(self._ends, index))
            else:
                stand_in(block, partial(self._absent, index))
        self._forward = model.forward
        model.forward = self.forward

    @property
    def device(self) -> torch.device:
        """Where its states are: with its weights."""
        return next(self.model.parameters()).device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward as far as this rank goes, and return the outputs of the last rank."""
        refuse_transforms("the model")
        if checkpointed():
            raise ChainError(
                "a checkpoint runs the whole model, and would run it again on each rank at another time. Put "
                "checkpoints inside of the model, around its blocks."
            )
        self.messages.settle()
        passes = [self._new_pass()]
        outputs = AllOutputs(self.messages, partial(self._look, passes[0].number))
        try:
            given = self._cutter(self.model, args, kwargs)
            passes += [self._new_pass() for _ in given[1:]]
            with self._shared.in_place(passes[0].number):
                found = [self._through(its, own.args, own.kwargs) for its, own in zip(passes, given, strict=True)]
            if self.messages.position == self.messages.count - 1:
                return outputs.hand_out(passes, joined(given, found))
            return outputs.receive(passes, self.device)
        except Exception as error:
            if halt := self.messages.stopped(error):
                (self._pass or passes[0]).give_up(halt)
                outputs.give_up(halt)
            raise
        finally:
            self._pass = None

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse to be copied with the model: ranks would wait for one copy's messages with the other's."""
        raise ChainError("a model whose blocks lie on ranks cannot be copied. Copy it first, then call layer_parallel.")

    def _new_pass(self) -> RankPass:
        self._number += 1
        return RankPass(self, self._number)

    def _through(self, its: RankPass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the model does on the last rank; on others let the next one go on."""
        self._pass = its
        try:
            out = self._forward(*args, **kwargs)
        except Left:
            return its.go_on()
        return its.end(out)

    def _look(self, number: int, cotangents: Sequence[Cotangent]) -> None:
        """Refuse a loss that is not the last rank's: of a first backward pass, the outputs' cotangents tell."""
        if self.is_new("the loss"):
            compare_loss(self.messages, number, cotangents)

    def is_new(self, what: object) -> bool:
        """Tell whether ``what`` has not been asked for before."""
        new = what not in self._new
        self._new.add(what)
        return new

    def keep(self, first: Tensor, of: RankPass) -> None:
        """Keep a pass for its backward pass."""
        self._passes[first] = of

    def pass_of(self, chain: DepthChain) -> RankPass:
        """Return the pass that ``chain`` was recorded in."""
        found: RankPass = self._passes[chain.links[0].out]
        return found

    def summed(self, chain: DepthChain, gradients: ChainGradients, number: int) -> ChainGradients:
        """Return ``gradients``, those of weights that blocks of several ranks share summed over these."""
        return self._shared.summed(chain, gradients, number)

    def _absent(self, index: int, *args: Any, **kwargs: Any) -> Any:
        if self._pass is None:
            path = self.placement.blocks[index]
            raise ChainError(f"{path} lies on another rank: call the model, on all ranks, not its blocks.")
        return self._pass.absent(index, *args, **kwargs)

    def _begins(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A checkpoint may run it again, for what autograd has kept of it.
        return None if self._pass is None or recomputed() else self._pass.block_begins(index, args, kwargs)

    def _ends(self, index: int, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._pass is not None and not recomputed():
            self._pass.block_ends(index, out)


def _site(model: nn.Module, engine: Engine, chains: Chains | None, residual: float | None, count: int) -> Site:
    kinds = [kind for kind in known_kinds() if kind.dimension == "depth" and not kind.of_layers]
    report = validate(model, chains, kinds)
    problems = [*engine.problems_across(count), *report.problems]
    if len(report.chains) > 1:
        problems.append(
            f"there are several chains; name the one whose blocks go to ranks: chains=[{next(iter(report.chains))!r}]."
        )
    for site in report.chains.values():
        site.declared = residual
    if problems:
        raise ChainError(
            "\n".join(
                [f"{type(model).__name__} cannot go to {count} ranks with {engine}:", *(f"- {p}" for p in problems)]
            )
        )
    return next(iter(report.chains.values()))


def _facts(model: nn.Module, placement: Placement) -> dict[str, str]:
    """Return what all ranks have to agree on, by what it is called."""
    runs = {
        f"the run of rank {rank}": f"blocks {run.start} to {run.stop - 1}" for rank, run in enumerate(placement.runs)
    }
    modules = {f"the module {path!r}": type(module).__name__ for path, module in model.named_modules()}
    weights = {
        f"the weight {name!r}": f"{tuple(p.shape)}, {p.dtype}, {'trained' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
    }
    places = {f"the place of {name!r}": f"{list(ranks)}" for name, ranks in placement.holders.items()}
    return runs | modules | weights | places
