"""Layers on ranks, trained by two passes that both go forward: a pipeline without a backward phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from gradfree.chains.site import Site
from gradfree.engines.discovery import Chains
from gradfree.engines.engine import Engine
from gradfree.errors import ChainError
from gradfree.layers.layer_chain import LINEAR
from gradfree.layers.roles import Role, adjoint, role_of
from gradfree.pipelines.forward_neighbours import ForwardNeighbours
from gradfree.pipelines.order import order
from gradfree.ranks.messages import Messages, check_tags, group_of
from gradfree.ranks.model_part import ModelPart
from gradfree.ranks.placeholders import EarlyExit, absent_weight
from gradfree.ranks.placement import Placement, only_chain, place, refuse_removed
from gradfree.registry import resolve_engine

Loss = Callable[[Tensor, Tensor], Tensor]


def forward_pipeline(
    model: nn.Module,
    loss: Loss,
    engine: str | Engine = "foton",
    *,
    microbatches: int = 1,
    mesh: DeviceMesh | distributed.ProcessGroup | None = None,
    chains: Chains | None = None,
    costs: Sequence[float] | None = None,
    **options: Any,
) -> ForwardPipeline:
    """Leave of ``model`` what this rank is to hold, one run of layers, and train it by passes that only go forward.

    Called on every rank of the group with the same model, before its optimizer is made, as :func:`layer_parallel` is.
    Both passes of FOTON (arXiv 2512.20668) go from the first rank to the last; a microbatch's error, (N, classes), goes
    from the last to the first, and once a step the transposed weights, a row for each class, from rank to rank. So a
    rank is done with a step as soon as it has its own gradients, and begins the next one.

    Args:
        model: any module with a chain of layers that the engine trains one by one, changed in place.
        loss: ``loss(outputs, targets)``, a mean over the samples.
        engine: "foton", or an engine like it.
        microbatches: the parts that a batch goes through the ranks in; with as many as there are ranks, or more, none
            waits for another once they have begun.
        mesh: the ranks, in the order of the layers: a dimension of a ``DeviceMesh``, a process group; by default all.
        chains: as in :meth:`gradfree.Engine.validate`, the one chain; by default it is found.
        costs: of each layer; by default its number of parameters. A layer's activation stays with it.
        **options: the engine's options, if it is given by name.

    Returns:
        What takes the steps.

    Raises:
        ChainError: the engine, the model or the options cannot be; ranks differ in them.
    """
    refuse_removed(options)
    group = group_of(mesh)
    check_tags(group, model, "forward pipelines")
    messages = Messages(group)
    solver = resolve_engine(engine, options)
    line = ForwardNeighbours(messages, next(model.parameters()).device)
    of_run = solver.onward(line)
    site = _site(model, solver, chains, messages.count, microbatches)
    layers = list(site.blocks.values())
    starts = [i for i, layer in enumerate(layers) if role_of(layer) is Role.WEIGHTS]
    placement = place(model, site, messages.count, costs, [0, *starts[1:]])
    weights = {f"the weight {name!r}": f"{tuple(p.shape)}, {p.dtype}" for name, p in model.named_parameters()}
    messages.agree({"the engine": repr(solver), "microbatches": microbatches, "runs": placement.runs, **weights})
    return ForwardPipeline(model, loss, of_run, line, placement, microbatches)


class ForwardPipeline(ModelPart):
    """One rank's part of a model, and of the steps that train it; see :func:`forward_pipeline`, which makes it.

    Attributes:
        handle: the engine's on this rank's layers.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        engine: Engine,
        line: ForwardNeighbours,
        placement: Placement,
        microbatches: int,
    ):
        super().__init__(model, placement, line.messages)
        self._loss, self._line, self._microbatches = loss, line, microbatches
        run = placement.runs[line.position]
        layers = [model.get_submodule(path) for path in placement.blocks]
        own = layers[run.start : run.stop]
        self.handle = engine.attach(model, [self.run])
        for layer in own:
            layer.register_forward_pre_hook(self._note, prepend=True)
        if line.is_last:
            own[-1].register_forward_hook(self._cut)
        for layer in layers[: run.start]:
            layer.forward = _same
        if run.start:
            layers[run.start - 1].forward = self._arrive
        for layer in layers[run.stop :]:
            layer.forward = _leave
        self._forward, model.forward = model.forward, self.outputs
        self._arrived: Tensor
        self._entered: dict[nn.Module, torch.Size] = {}
        self._end: tuple[Tensor, Tensor]
        self._left: dict[int, tuple[Tensor, Tensor]] = {}
        self._passed, self._stopped = 0, ""

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Add the gradients of a batch to those of this rank's weights; all ranks call it with the same batch.

        Args:
            inputs: (N, ...), what the model takes.
            targets: (N, ...), what the loss takes.

        Returns:
            The loss on the last rank, ``None`` on the others: they do not wait for it.

        Raises:
            ChainError: fewer samples than microbatches, on all ranks, which may take other steps; after any other
                error, of this rank or of another, the pipeline takes no step any more.
        """
        # All ranks see the same batch, and so raise this.
        if len(inputs) < self._microbatches:
            raise ChainError(f"{len(inputs)} samples cannot go through the ranks in {self._microbatches} parts.")
        with self._stopping():
            sent = self.messages.unsettled
            parts = list(zip(*(t.tensor_split(self._microbatches) for t in (inputs, targets)), strict=True))
            self._entered, total = {}, None
            for job, j in order(self._line.position, self._line.count, self._microbatches):
                self._line.number = self._passed + j
                if job == "first pass":
                    part, its_targets = parts[j]
                    found = self._first_pass(j, part, its_targets, len(part) / len(inputs))
                    total = found if total is None or found is None else total + found
                elif job == "feedback":
                    self._carry_back()
                    # Not before: what comes from the rank on the right shows that it has taken all of the last step.
                    self.messages.settle(sent)
                else:
                    torch.autograd.backward(*self._left.pop(j))
            self._passed += self._microbatches
        return total

    @torch.no_grad()
    def outputs(self, inputs: Tensor) -> Tensor | None:
        """Return the model's outputs on the last rank, ``None`` on the others, without gradients."""
        with self._stopping():
            sent = self.messages.unsettled
            self._line.number = self._passed
            out = self._run(inputs)
            if not self._line.is_last:
                self._line.state_leaving(out)
            self.messages.settle(sent)
            self._passed += 1
        return out if self._line.is_last else None

    def _run(self, inputs: Tensor) -> Tensor:
        """Return the last state that this rank comes to; of the last rank, the model's outputs."""
        if self._line.position:
            # In need of a gradient: what is behind it is recorded, trained or not.
            self._arrived = self._line.state_entering().requires_grad_(torch.is_grad_enabled())
        try:
            out: Tensor = self._forward(inputs)
        except EarlyExit as leaving:
            return leaving.state
        return out

    def _first_pass(self, j: int, inputs: Tensor, targets: Tensor, share: float) -> Tensor | None:
        """Run a microbatch; return its share of the loss on the last rank."""
        out = self._run(inputs)
        if not self._line.is_last:
            self._line.state_leaving(out)
            # What comes back to the state comes by the second pass.
            self._left[j] = out, out.new_zeros(()).expand_as(out)
            return None
        self._refuse_absent(out)
        loss = share * self._loss(out, targets)
        loss.backward()
        state, end = self._end
        del self._end
        if end.grad is None or end.dim() != 2:
            raise ChainError(
                f"the layers end with {tuple(end.shape)}, which a loss must use: a forward pipeline takes outputs "
                "(samples, classes)."
            )
        self._left[j] = state, end.grad
        self._line.error(end.grad)
        return loss.detach()

    def _carry_back(self) -> None:
        """Send what the transposed weights make of each class, from here to the end, to the rank on the left."""
        if self._line.is_last:
            _, error = self._left[0]
            dtype = torch.promote_types(error.dtype, torch.float32)
            rows = torch.eye(error.shape[1], dtype=dtype, device=error.device)
        else:
            rows = self._line.rows_entering()
        with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
            for layer, shape in reversed(self._entered.items()):
                if role_of(layer) in LINEAR:
                    rows = adjoint(layer, rows, shape)
        self._line.rows_leaving(rows)

    def _note(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Note what a layer is given, but for those before all that is trained, which are left out of the chain."""
        if args[0].requires_grad or any(p.requires_grad for p in layer.parameters()):
            self._entered[layer] = args[0].shape

    def _cut(self, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        """Let the loss's backward pass end at the chain's end: the error is sent long before the chain is solved."""
        if not out.requires_grad:
            return None
        self._end = out, out.detach().requires_grad_()
        return self._end[1]

    def _refuse_absent(self, out: Tensor) -> None:
        """Refuse a model that uses weights of another rank behind its layers, in its first pass."""
        if self.is_new("outputs") and (name := absent_weight([out], self.absent)):
            raise ChainError(
                f"what the model returns depends on {name}, which is not on the last rank. Register it behind the "
                "layers, or use layer_parallel, which sends it."
            )

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Report what stops this rank, which takes no step any more."""
        if self._stopped:
            raise ChainError(
                "this pipeline has stopped, and its ranks may differ by a step: start again from a checkpoint, in a "
                f"new process group. What has stopped it: {self._stopped}"
            )
        try:
            yield
        except Exception as error:
            self._stopped = f"{type(error).__name__}: {error}"
            self.messages.report(error)
            raise

    def _arrive(self, _: Tensor) -> Tensor:
        return self._arrived


def _same(state: Tensor) -> Tensor:
    return state


def _leave(state: Tensor) -> None:
    raise EarlyExit(state)


def _site(model: nn.Module, engine: Engine, chains: Chains | None, count: int, microbatches: int) -> Site:
    report = engine.judge(model, engine.find(model, chains))
    problems = []
    if count < 2:
        problems.append("there is one rank: attach the engine instead.")
    if microbatches < 1:
        problems.append(f"microbatches must be at least 1, not {microbatches}.")
    for site in report.chains.values():
        *_, (path, end) = site.blocks.items()
        if role_of(end) is not Role.WEIGHTS:
            problems.append(f"{path} is the last layer, but has no weights: leave it out, or let the loss do it.")
    return only_chain(model, report, problems, f"{count} ranks")
