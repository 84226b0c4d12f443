"""One rank's part of a model whose blocks lie on several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from gradfree.algebra.cotangents import Cotangent
from gradfree.chains.kinds import known_kinds
from gradfree.chains.site import Site
from gradfree.depth.depth_pass import recorded_links
from gradfree.depth.ports import port_of
from gradfree.engines.discovery import Chains, validate
from gradfree.engines.engine import Engine
from gradfree.errors import BETWEEN, ChainError
from gradfree.ranks.messages import Messages, group_of
from gradfree.ranks.microbatches import Cutter, joined
from gradfree.ranks.model_part import ModelPart
from gradfree.ranks.on_rank import OnRank
from gradfree.ranks.outputs import compare_loss, outputs_of_last
from gradfree.ranks.placeholders import EarlyExit
from gradfree.ranks.placement import Placement, place
from gradfree.ranks.rank_pass import RankPass
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
    cutter = Cutter(model.forward, microbatches, uncut)
    messages = Messages(group)
    solver = resolve_engine(engine, options)
    site = _site(model, solver, chains, residual, messages.count)
    placement = place(model, site, messages.count, costs)
    chosen = {"the engine": repr(solver), "microbatches": microbatches, "uncut": sorted(uncut)}
    messages.agree(chosen | _facts(model, placement))
    return Stage(model, solver, placement, messages, residual, cutter)


def stage_of(model: nn.Module) -> Stage | None:
    """Return what a model lies on ranks by, if it does."""
    host = getattr(model.forward, "__self__", None)
    return host if isinstance(host, Stage) else None


class Stage(ModelPart):
    """One rank's part of a model; see :func:`layer_parallel`, which makes it.

    Attributes:
        messages: the ranks.
        placement: what lies where.
        handle: the engine's on this rank's blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        placement: Placement,
        messages: Messages,
        residual: float | None,
        cutter: Cutter,
    ):
        blocks = [model.get_submodule(path) for path in placement.blocks]
        self._ports = [port_of(block) for block in blocks]
        super().__init__(model, placement, messages)
        self._cutter, self._passes = cutter, WeakTensorKeyDictionary()
        name = f"{self.run[0]} to {self.run[-1]}, of rank {messages.position}"
        on_rank = OnRank(engine=engine, name=name, messages=messages, passes=self._passes)
        self.handle = on_rank.attach(model, [self.run], residual=residual)
        self._splits = self.handle.chains[name].splits
        self._pass: RankPass | None = None
        self._number = 0
        for index, block in enumerate(blocks):
            if index in placement.runs[messages.position]:
                block.register_forward_pre_hook(partial(self._begins, index), prepend=True, with_kwargs=True)
                block.register_forward_hook(partial(self._ends, index))
            else:
                block.forward = partial(self._absent, index)
        self._forward = model.forward
        model.forward = self.forward

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
        try:
            given = self._cutter(self.model, args, kwargs)
            passes += [self._new_pass() for _ in given[1:]]
            found = [self._through(its, own.args, own.kwargs) for its, own in zip(passes, given, strict=True)]
            sent = [its.sent() for its in passes]
            out = joined(given, found) if self.messages.position == self.messages.count - 1 else None
            return outputs_of_last(self.messages, passes[0].number, self._check_loss, sent, self.device, out)
        except Exception as error:
            self.messages.report(error)
            raise
        finally:
            self._pass = None

    def _new_pass(self) -> RankPass:
        self._number += 1
        return RankPass(self, self._ports, self._number)

    def _through(self, its: RankPass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the model does on the last rank; on others send the state to the next one."""
        self._pass = its
        try:
            return its.end(self._forward(*args, **kwargs))
        except EarlyExit:
            return its.leave()

    def _check_loss(self, cotangents: Sequence[Cotangent]) -> None:
        """Refuse a loss that is not the last rank's: by the outputs' cotangents in a first backward pass."""
        if self.is_new("the loss"):
            compare_loss(self.messages, cotangents)

    def _absent(self, index: int, *args: Any, **kwargs: Any) -> Any:
        if self._pass is None:
            path = self.placement.blocks[index]
            raise ChainError(f"{path} lies on another rank: call the model, on all ranks, not its blocks.")
        return self._pass.absent(index, *args, **kwargs)

    def _begins(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A checkpoint may run it again, for what autograd has kept of it.
        if self._pass is None or recomputed():
            return None
        return self._pass.block_begins(index, args, kwargs)

    def _ends(self, index: int, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._pass is None or recomputed():
            return
        self._pass.block_ends(index, out)
        state = self._pass.last_state
        if index == self.placement.runs[self.messages.position].stop - 1 and state is not None:
            self._passes[self._first_output(state)] = self._pass

    def _first_output(self, state: Tensor) -> Tensor:
        """Return what the first block of the recorded pass has returned; refuse what is not recorded as one chain."""
        if self._splits:
            path, reason = next(iter(self._splits.items()))
            raise ChainError(f"across ranks the blocks must be one chain, but {path} is not part of it: {reason}.")
        links = recorded_links(state)
        if not links:
            raise BETWEEN.error(path=f"what comes after {self.run[-1]}")
        first: Tensor = links[0].out
        return first


def _site(model: nn.Module, engine: Engine, chains: Chains | None, residual: float | None, count: int) -> Site:
    kinds = [kind for kind in known_kinds() if kind.dimension == "depth" and not kind.of_layers]
    report = validate(model, chains, kinds)
    problems = [*engine.problems_on_ranks(count), *report.problems]
    if len(report.chains) > 1:
        problems.append(
            f"there are several chains; name the one that goes to ranks: chains=[{next(iter(report.chains))!r}]."
        )
    if problems:
        where = f"{type(model).__name__} cannot go to {count} ranks with {engine}:"
        raise ChainError("\n".join([where, *(f"- {problem}" for problem in problems)]))
    (site,) = report.chains.values()
    site.declared = residual
    return site


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
    return runs | modules | weights
