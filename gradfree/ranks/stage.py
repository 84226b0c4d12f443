"""``layer_parallel``, and the stage that it returns: one rank's part of a model whose blocks are on several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from gradfree.algebra.cotangents import Cotangent
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.kinds import known_kinds
from gradfree.chains.site import Site
from gradfree.depth.depth_chain import DepthChain
from gradfree.depth.depth_pass import recorded_links
from gradfree.depth.ports import port_of, replaced, tensors_in
from gradfree.engines.discovery import Chains, validate
from gradfree.engines.engine import Engine
from gradfree.errors import BETWEEN, EXACT_ON_RANKS, INPUT_WITH_GRADIENT, ChainError
from gradfree.ranks.crossings import Sent
from gradfree.ranks.messages import OUTPUTS, Messages, group_of
from gradfree.ranks.model_part import ModelPart
from gradfree.ranks.placeholders import EarlyExit
from gradfree.ranks.placement import Placement, place
from gradfree.ranks.rank_pass import RankPass
from gradfree.registry import resolve_engine
from gradfree.torchside.guards import refuse_transforms
from gradfree.torchside.private import after_backward, checkpointed, recomputed, uncompiled
from gradfree.torchside.random_state import drawing_apart


def layer_parallel(
    model: nn.Module,
    engine: str | Engine = "highway_bp",
    *,
    mesh: DeviceMesh | distributed.ProcessGroup | None = None,
    chains: Chains | None = None,
    costs: Sequence[float] | None = None,
    residual: float | None = None,
    **options: Any,
) -> Stage:
    """Split ``model`` across ranks: each rank keeps one run of blocks; the first and last also the modules around them.

    Call it on every rank of the group with the same model, before making the optimizer: ``model.parameters()`` are then
    those of this rank. The training loop does not change, and all ranks get the same batches. ``model(x)`` returns the
    same outputs everywhere, and ``loss.backward()`` solves the runs of all ranks at once. The method is multiple
    shooting (Bock & Plitt 1984) with Highway-BP (arXiv 2501.17086) across the borders. With n ranks,
    gradients are exact for ``iterations`` of n - 1 or more.

    Args:
        model: any module with a chain of blocks, changed in place.
        engine: "highway_bp", "fixed_point" or "backprop", or such an engine.
        mesh: the ranks, in the order of the blocks: a dimension of a ``DeviceMesh``, a process group; by default all.
        chains: the one chain to split, as in :meth:`gradfree.Engine.validate`; by default it is found.
        costs: of each block, such as its measured time, to balance the runs; by default its number of parameters.
        residual: as in :meth:`gradfree.Engine.attach`.
        **options: the engine's options, if it is given by name.

    Returns:
        The rank's stage.

    Raises:
        ChainError: the engine, the model or an option is not supported; or ranks differ in them.
    """
    if stage_of(model) is not None:
        raise ChainError("the model is split across ranks already: call layer_parallel once for each model.")
    group = group_of(mesh)
    messages = Messages(group)
    solver = resolve_engine(engine, options)
    site = _site(model, solver, chains, residual, messages.count)
    placement = place(model, site, messages.count, costs)
    messages.agree({"the engine": repr(solver), "residual": repr(residual)} | _facts(model, placement))
    return Stage(model, solver, placement, messages, residual)


def stage_of(model: nn.Module) -> Stage | None:
    """Return the stage of a model that is split across ranks; ``None`` if it is not."""
    owner = getattr(model.forward, "__self__", None)
    return owner if isinstance(owner, Stage) else None


class Stage(ModelPart):
    """One rank's part of a model; made by :func:`layer_parallel`.

    Attributes:
        messages: connects the ranks.
        placement: which rank holds what.
        handle: of the engine that is attached to this rank's blocks.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, placement: Placement, messages: Messages, residual: float | None
    ):
        blocks = [model.get_submodule(path) for path in placement.blocks]
        self._ports = [port_of(block) for block in blocks]
        super().__init__(model, placement, messages)
        self._passes = WeakTensorKeyDictionary()
        on_rank = OnRank(engine=engine, messages=messages, passes=self._passes)
        self.handle = on_rank.attach(model, [self.run], residual=residual)
        (chain,) = self.handle.chains.values()
        self._splits = chain.splits
        self._pass: RankPass | None = None
        self._number = 0
        for index, block in enumerate(blocks):
            if index in placement.runs[messages.position]:
                block.register_forward_pre_hook(partial(self._before_block, index), prepend=True, with_kwargs=True)
                block.register_forward_hook(partial(self._after_block, index))
            else:
                block.forward = partial(self._absent, index)
        self._forward = model.forward
        model.forward = self.forward

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward up to this rank's last block, and return the outputs of the last rank.

        Each rank runs other modules, so what these draw is drawn apart: behind it all ranks draw the same numbers.
        """
        refuse_transforms("the model")
        if checkpointed():
            raise ChainError(
                "a checkpoint runs the whole model, and would run it again on each rank at another time. Put "
                "checkpoints inside of the model, around its blocks."
            )
        several = self.messages.count > 1
        for given in tensors_in([args, kwargs]):
            if given.requires_grad and torch.is_grad_enabled() and several:
                raise INPUT_WITH_GRADIENT.error(shape=tuple(given.shape))
        self.messages.settle()
        self._number += 1
        rank_pass = RankPass(self, self._ports, self._number)
        try:
            with drawing_apart(self._number, self.device) if several else nullcontext():
                out, sent = self._run(rank_pass, args, kwargs), rank_pass.sent()
            return self._shared(out, rank_pass.number, sent) if several else out
        finally:
            self._pass = None

    def _run(self, rank_pass: RankPass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's output on the last rank; on others send the last state to the next rank."""
        self._pass = rank_pass
        try:
            return rank_pass.end(self._forward(*args, **kwargs))
        except EarlyExit:
            return rank_pass.send_right()

    def _shared(self, out: Any, number: int, sent: Tensor) -> Any:
        """Return the model's output on all ranks, each of which computes the same loss from it.

        Args:
            out: the model's output on the last rank, which sends it to the others; ignored on these.
            number: of the pass.
            sent: the last state of this rank's blocks; every backward pass must reach it, because other ranks wait.
        """
        messages, last, what = self.messages, self.messages.count - 1, "the model's outputs"
        if messages.position == last:
            skeleton, tensors = _skeleton(out)
            needing = [tensor.requires_grad for tensor in tensors]
            for other in range(last):
                messages.send_all(tensors, other, number, OUTPUTS, what, (skeleton, needing))
            messages.settle()
        else:
            tensors, (skeleton, needing) = messages.receive_all(last, number, OUTPUTS, what, self.device)
        if torch.is_grad_enabled() and any(needing):
            tensors = Sent.apply(self._check_loss, needing, sent, *tensors)
        return replaced(skeleton, {id(number): tensors[int(number)] for number in tensors_in(skeleton)})

    def _check_loss(self, cotangents: Sequence[Cotangent]) -> None:
        """Check once, in the first backward pass on all ranks, that this rank's loss is that of the last rank.

        Compares the norms of the outputs' cotangents, to a tolerance for different devices.
        """
        if not self.is_new("the loss"):
            return
        here = [-1.0 if c is None else float(torch.linalg.vector_norm(c)) for c in cotangents]
        there = self.messages.all_gather(here, "the gradients of the model's outputs")[-1]
        if not torch.allclose(torch.tensor(here), torch.tensor(there), rtol=1e-3, atol=0.0, equal_nan=True):
            raise ChainError(
                f"the loss is not that of the last rank: the gradients of the model's outputs have norms {here} here, "
                f"{there} there. All ranks must get the same batches and compute the same loss."
            )

    def _absent(self, index: int, /, *args: Any, **kwargs: Any) -> Any:
        if self._pass is None:
            path = self.placement.blocks[index]
            raise ChainError(f"{path} is on another rank: call the model, on all ranks, not its blocks.")
        return self._pass.absent(index, *args, **kwargs)

    def _before_block(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A checkpoint recomputes a call that is recorded already.
        if self._pass is None or recomputed():
            return None
        return self._pass.block_begins(index, args, kwargs)

    def _after_block(self, index: int, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._pass is None or recomputed():
            return
        self._pass.block_ends(index, out)
        state = self._pass.last_state
        if index == self.placement.runs[self.messages.position].stop - 1 and state is not None:
            self._passes[self._first_output(state)] = self._pass

    def _first_output(self, state: Tensor) -> Tensor:
        """Return the output of the first block of the recorded pass.

        Raises:
            ChainError: the rank's blocks are not recorded as one chain.
        """
        if self._splits:
            path, reason = next(iter(self._splits.items()))
            raise ChainError(f"across ranks the blocks must be one chain, but {path} is not part of it: {reason}.")
        links = recorded_links(state)
        if not links:
            raise BETWEEN.error(path=f"what comes after {self.run[-1]}")
        first: Tensor = links[0].out
        return first


@dataclass(frozen=True, kw_only=True)
class OnRank(Engine):
    """Lets an engine solve a rank's chain together with the neighbouring ranks.

    Args:
        engine: the user's engine.
        messages: connects the ranks.
        passes: the passes that may have a backward pass, by the output of their first block.
    """

    engine: Engine
    messages: Messages = field(repr=False)
    passes: Mapping[Tensor, RankPass] = field(repr=False)

    @property
    def needs_residual(self) -> bool:
        """Whether the engine asks for a chain's residual path."""
        return self.engine.needs_residual

    def problems_with(self, site: Site) -> Iterator[str]:
        """Yield the engine's problems with the chain."""
        return self.engine.problems_with(site)

    def exact_gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Raise: a rank would lack the cotangents of the others."""
        raise EXACT_ON_RANKS.error(path=chain.path)

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients of this rank's links."""
        assert isinstance(chain, DepthChain)
        rank_pass = self.passes[chain.links[0].out]
        chain.before = rank_pass.before
        gradients = self.engine.gradients_on_ranks(chain, direct, rank_pass)
        # Wait only after the backward pass: the other rank may first need another message from this one.
        after_backward(self.messages.settle)
        return gradients


def _skeleton(out: Any) -> tuple[Any, list[Tensor]]:
    """Return ``out`` with indices in place of its tensors, and these tensors."""
    tensors = tensors_in(out)
    return replaced(out, {id(tensor): torch.tensor(n) for n, tensor in enumerate(tensors)}), tensors


def _site(model: nn.Module, engine: Engine, chains: Chains | None, residual: float | None, count: int) -> Site:
    kinds = [kind for kind in known_kinds() if kind.dimension == "depth" and not kind.of_layers]
    report = validate(model, chains, kinds)
    problems = [*engine.problems_on_ranks(count), *report.problems]
    if len(report.chains) > 1:
        problems.append(f"there are several chains; name the one to split, chains=[...]: {', '.join(report.chains)}.")
    if problems:
        where = f"{type(model).__name__} cannot be split across {count} ranks with {engine}:"
        raise ChainError("\n".join([where, *(f"- {problem}" for problem in problems)]))
    (site,) = report.chains.values()
    site.declared = residual
    return site


def _facts(model: nn.Module, placement: Placement) -> dict[str, str]:
    """Return the properties of the model and its placement that must be equal on all ranks, by name."""
    runs = {
        f"the run of rank {rank}": f"blocks {run.start} to {run.stop - 1}" for rank, run in enumerate(placement.runs)
    }
    modules = {f"the module {path!r}": type(module).__name__ for path, module in model.named_modules()}
    weights = {
        f"the weight {name!r}": f"{tuple(p.shape)}, {p.dtype}, {'trained' if p.requires_grad else 'frozen'}, on rank "
        f"{placement.home[name]}"
        for name, p in model.named_parameters()
    }
    return runs | modules | weights
