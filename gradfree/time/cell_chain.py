"""Chains in time of any cell: VJPs of all steps in one batch, by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from gradfree.algebra.block_scan import Blocks
from gradfree.algebra.cotangents import Factor, plus, times
from gradfree.chains.chain import ChainGradients
from gradfree.chains.memory import Memory
from gradfree.chains.refusals import problem_of_hidden_parameters, problems_of_backward_hooks, problems_of_forward_hooks
from gradfree.chains.report import path_name
from gradfree.devices.hardware import product_rounding
from gradfree.errors import COMPLEX_JACOBIAN, RANDOM_CELL, ChainError
from gradfree.time.cell_layer import ElementwiseCell, apply_cell, output_size, run_steps, unit_blocks
from gradfree.time.closed_forms import Links, State
from gradfree.time.recorded_step import recorded_step
from gradfree.time.time_chain import Factors, TimeChain
from gradfree.torchside.batched_vjps import batched_vjps
from gradfree.torchside.graph import operations, walk
from gradfree.torchside.guards import refuse_other_values
from gradfree.torchside.hooks import without_hooks
from gradfree.torchside.private import is_simulated


class CellLayerChain(TimeChain):
    """The chain of a layer of any cell, which runs again on all steps as one batch, with a graph.

    Args:
        cell: the cell.
        x: (T, B, I).
        before: the states before each step, part by part, (T, B, ·).
        finals: the states after the last step in the forward pass, (B, ·) each; in a batch they round differently.
        parameters: the cell's parameters in the forward pass.
        wanted: whether the gradient of each parameter is needed.
        memory: the chain's memory from pass to pass.
        where: the cell's name in messages.

    Attributes:
        operations: what a step consists of; see :func:`~gradfree.torchside.graph.operations`.

    Raises:
        ChainError: the cell has other parameters now, or uses tensors that need gradients and are not registered.
    """

    def __init__(
        self,
        cell: nn.Module,
        x: Tensor,
        before: Sequence[Tensor],
        finals: Sequence[Tensor],
        parameters: Sequence[Tensor],
        wanted: Sequence[bool],
        memory: Memory,
        where: str,
    ):
        # 1 if the first part is an output that no step reads.
        self._extra_outputs = int(output_size(cell) is not None)
        super().__init__(len(x), before[self._extra_outputs], memory)
        own = list(cell.parameters())
        self.cell, self.parameters, self.shape, self.finals = cell, own, x.shape[:2], finals
        self.kind = "separate units" if isinstance(cell, ElementwiseCell) else "any"
        # A checkpoint saves other tensor objects that share the memory.
        if len(own) != len(parameters) or not all(map(_same, parameters, own)):
            raise ChainError(
                f"{where} has other parameters in the backward pass than in the forward pass "
                "(torch.func.functional_call gives them back before), but an engine runs it in both. Load the "
                "parameters into the model."
            )
        # As in autograd, parameters that were frozen after the forward pass get no gradient.
        self.trained = [p for p, want in zip(own, wanted, strict=True) if want and p.requires_grad]
        with torch.enable_grad():
            self.x = x.detach().requires_grad_(x.is_floating_point() or x.is_complex())
            self.before = [part.detach().requires_grad_() for part in before]
            # contiguous(): a cell may compute a view of what it is given, or a copy.
            rows, *parts = (given.flatten(0, 1).contiguous() for given in (self.x, *self.before))
            with _as_one_batch(where) if len(x) > 1 else nullcontext():
                after = recorded_step(partial(apply_cell, cell), where, rows, parts)
            self.states = self.after = [part.unflatten(0, self.shape) for part in after]
        self.operations = operations(after, [rows, *parts, *own])
        known = {id(t) for t in (self.x, *self.before, *own)}
        reached = walk(self.after)
        if any(id(leaf) not in known for leaf in reached.leaves):
            raise ChainError(
                f"{where} uses a tensor that needs a gradient and is neither its input nor one of its "
                "parameters. Register it as a parameter of the cell."
            )
        trained = ((name, p) for name, p in cell.named_parameters() if any(p is own for own in self.trained))
        if (problem := problem_of_hidden_parameters(where, reached, trained)) is not None:
            raise ChainError(problem)

    @property
    def diagonal(self) -> Sequence[Factor]:
        """The diagonals of an elementwise cell's F_t; 0.0 for any other cell, as its Jacobian is not known."""
        if self.kind == "any":
            return [0.0] * len(self.before)
        own = [row[n] for n, row in enumerate(self._blocks)]
        return [0.0 if d is None else d for d in own]

    @cached_property
    def _blocks(self) -> Blocks:
        return unit_blocks(self.after, self.before)

    def constant(self, factor: Factor) -> Factors:
        """Return K_t = ``factor`` for every part of the state."""
        own = len(self.states) - self._extra_outputs
        widths = {state.shape[-1] for state in self.states[self._extra_outputs :]}
        if isinstance(factor, Tensor) and factor.dim() and len(widths) > 1:
            raise ChainError(
                f"the parts of the cell's state have {sorted(widths)} units, so one vector of numbers does not fit "
                "all. Use one number for all units, for example DSF's feedback=0.7."
            )
        return (*[0.0] * self._extra_outputs, *[factor] * own)

    def unit_blocks(self, carried: bool) -> Blocks:
        """Return the unit-by-unit Jacobians: of an elementwise cell all of F_t, of any other from dense Jacobians.

        ``carried`` changes nothing: a cell has no W_hh that could be left out.
        """
        if self.kind != "any":
            return self._blocks
        widths = [part.shape[2:].numel() for part in self.after]
        rows = [row.split(widths, -1) for row in self._all_jacobians().split(widths, -2)]
        return [[_diagonal(f, self.like.dtype) for f in row] for row in rows]

    def rest_vjp(self, delta: State, factors: Factors) -> State:
        """Return δ_t (F_t - K_t) for t = 2..T."""
        vjps = self._vjp(delta, self.before)
        whole = (plus(v, times(d, -known)) for v, d, known in zip(vjps, delta, factors, strict=True))
        return tuple(None if v is None else v[1:] for v in whole)

    def jacobians(self) -> Tensor:
        """Return F_2 to F_T of every sequence, (T - 1, B, H, H), the parts of a state concatenated."""
        return self._all_jacobians()[1:]

    def _all_jacobians(self) -> Tensor:
        if any(part.is_complex() for part in self.after):
            raise COMPLEX_JACOBIAN.error(path=path_name(self.path))
        widths = [part.shape[2:].numel() for part in self.after]
        identity = torch.eye(sum(widths), device=self.like.device)
        rows = [part[:, None, None].expand(-1, *self.shape, -1) for part in identity.split(widths, -1)]
        given = [row.reshape(len(row), *a.shape).to(a.dtype) for row, a in zip(rows, self.after, strict=True)]
        live = [n for n, a in enumerate(self.after) if a.requires_grad]
        vjps = batched_vjps([self.after[n] for n in live], self.before, [given[n] for n in live])
        parts = [torch.zeros_like(row) if v is None else v.flatten(3) for row, v in zip(rows, vjps, strict=True)]
        wide = torch.promote_types(self.like.dtype, torch.float32)
        return torch.cat(parts, -1).permute(1, 2, 0, 3).to(wide)

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """h_0 and h_T, of the first part that the next step reads."""
        return self.before[self._extra_outputs][0].detach(), self.finals[self._extra_outputs].detach()

    def run(self, initial: Sequence[Tensor] | None = None, parameters: Sequence[Tensor] | None = None) -> State:
        """Return the states of another pass over the same input, (T, B, ·) each."""
        first = [part[0].detach() for part in self.before] if initial is None else initial
        with torch.no_grad():
            steps = self._with(self.parameters if parameters is None else parameters, run_steps, self.x, first)
        return tuple(torch.stack(part) for part in zip(*steps, strict=True))

    def sample_gradients(self, delta: State, steps: slice = slice(None), sets: int = 1) -> list[Tensor | None]:
        """Return δ_t ∂f_t/∂θ of each sequence, by autograd under ``vmap``."""
        trained = [n for n, p in enumerate(self.parameters) if any(p is own for own in self.trained)]

        def weighted(chosen: Sequence[Tensor], x: Tensor, before: Sequence[Tensor], delta: Sequence[Tensor]) -> Tensor:
            given = list(self.parameters)
            for n, p in zip(trained, chosen, strict=True):
                given[n] = p
            after = self._with(given, apply_cell, x, before)
            return torch.stack([(d * a).sum() for d, a in zip(delta, after, strict=True)]).sum()

        own = [
            torch.zeros_like(s[steps]).repeat(1, sets, 1) if d is None else d
            for d, s in zip(delta, self.states, strict=True)
        ]
        of_sample = vmap(grad(weighted), in_dims=(None, 1, 1, 1))
        found = vmap(of_sample, in_dims=(None, None, None, 1), out_dims=1)(
            [self.parameters[n].detach() for n in trained],
            self.x[steps].detach(),
            [part[steps].detach() for part in self.before],
            [d.unflatten(1, (sets, -1)) for d in own],
        )
        gradients = dict(zip(trained, found, strict=True))
        return [gradients.get(n) for n in range(len(self.parameters))]

    def _with(self, parameters: Sequence[Tensor], run: Callable[..., Any], *args: Any) -> Any:
        """Return ``run(cell, *args)`` with other parameters."""
        names = [f"cell.{name}" for name, _ in self.cell.named_parameters()]
        return functional_call(_Running(self.cell, run), dict(zip(names, parameters, strict=True)), args)

    def rearranged(self, change: Callable[[Tensor], Tensor]) -> Links:
        """Return the links in another order."""
        before = [change(part.detach()) for part in self.before]
        return _CellLinks(self.cell, change(self.x.detach()), before)

    def gradients(self, delta: State) -> ChainGradients:
        """Return δ_t ∂f_t/∂θ summed over t, the inputs' gradients, and those of the initial state."""
        self.record_delta(delta)
        x = [self.x] if self.x.requires_grad else []
        with without_hooks(self.trained):
            vjps = iter(self._vjp(delta, [*self.before, *x, *self.trained]))
        initial = tuple(None if (g := next(vjps)) is None else g[0] for _ in self.before)
        of_x = next(vjps) if x else None
        of_trained = {id(p): g for p, g in zip(self.trained, vjps, strict=True)}
        return ChainGradients(initial, [of_x], [of_trained.get(id(p)) for p in self.parameters])

    def _vjp(self, delta: State, targets: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        live = [(a, d) for a, d in zip(self.after, delta, strict=True) if d is not None and a.requires_grad]
        # Copies, as custom functions may write to the cotangents that they are given.
        after, cotangents = zip(*((a, d.clone()) for a, d in live), strict=True)
        return torch.autograd.grad(after, targets, cotangents, retain_graph=True, allow_unused=True)


class _Running(nn.Module):
    """Runs a function of a cell, for ``functional_call``."""

    def __init__(self, cell: nn.Module, run: Callable[..., Any]):
        super().__init__()
        self.cell, self.run = cell, run

    def forward(self, *args: Any) -> Any:
        return self.run(self.cell, *args)


@dataclass(frozen=True)
class _CellLinks(Links):
    """The :class:`Links` of any cell, with one small graph for each step.

    Attributes:
        cell: the cell.
        x: (T, B, I).
        before: the states before each step, part by part, (T, B, ·).
    """

    cell: nn.Module
    x: Tensor
    before: Sequence[Tensor]

    def unroll(self, direct: State, entering: Sequence[Tensor] | None = None) -> State:
        delta = tuple(torch.zeros_like(b) if e is None else e.clone() for e, b in zip(direct, self.before, strict=True))
        for part, enters in zip(delta, entering or (), strict=False):
            part[-1] += enters
        for t in range(len(delta[0]) - 1, 0, -1):
            for part, v in zip(delta, self._step_vjp(delta, t), strict=True):
                part[t - 1] += v
        return delta

    def initial_cotangent(self, delta: State) -> Sequence[Tensor]:
        return self._step_vjp(delta, 0)

    def jvp(self, tangents: Sequence[Tensor], step: int) -> Sequence[Tensor]:
        before = tuple(part[step] for part in self.before)
        return jvp(lambda *parts: apply_cell(self.cell, self.x[step], parts), before, tuple(tangents))[1]

    def _step_vjp(self, delta: State, t: int) -> list[Tensor]:
        """Return δ_t F_t."""
        with torch.enable_grad():
            before = [part[t].detach().requires_grad_() for part in self.before]
            after = apply_cell(self.cell, self.x[t], before)
        # Copies, as in CellLayerChain.
        vjps = torch.autograd.grad(after, before, [part[t].clone() for part in delta], allow_unused=True)
        return [torch.zeros_like(b) if v is None else v for b, v in zip(before, vjps, strict=True)]


def check_batched_states(
    again: Sequence[Tensor], states: Sequence[Tensor], where: str, within: float = 0.0, wait: bool = False
) -> None:
    """Raise if a cell returns other states when it runs on all steps as one batch.

    Args:
        again: the parts of the states after some steps, from one of the two runs.
        states: the same states from the other run.
        where: the cell's name in messages.
        within: the error of the states, relative to the largest.
        wait: whether the host waits for a GPU.

    Raises:
        ChainError: the states differ by more.
    """
    for after, state in zip(again, states, strict=True):
        eps = max(torch.finfo(state.dtype).eps, 2 * product_rounding(state.device, state.dtype))
        rounding = max(min(10 * eps**0.5, 0.1), 10 * within)
        refuse_other_values(
            after.detach().to(state.dtype),
            state,
            rounding,
            f"{where} gives other states {_ONE_BATCH}",
            wait,
        )


_ONE_BATCH = (
    "when it runs on all steps as one batch: an engine needs a cell whose output only depends on its own row of input "
    "and state, without random numbers or counters, and that is not changed between the forward and the backward pass. "
    "'backprop' and 'shooting' take any cell."
)


@contextmanager
def _as_one_batch(where: str) -> Iterator[None]:
    """Say what an error is about that a cell raises on all steps, such as one with tensors of B rows from outside."""
    try:
        yield
    except (ChainError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise ChainError(f"{where} raises an error ({said}) {_ONE_BATCH}") from error


def _diagonal(jacobians: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the diagonals of square matrices; ``None`` for those between parts of different widths."""
    square = jacobians.shape[-1] == jacobians.shape[-2]
    return jacobians.diagonal(0, -2, -1).to(dtype) if square else None


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or is_simulated(a) or (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def autocast_now(x: Tensor) -> torch.autocast:
    """Return a context with the current autocast settings for the device of ``x``."""
    kind = x.device.type
    return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))


def cell_problems(where: str, cell: nn.Module) -> Iterator[str]:
    """Yield why ``cell``, at the path ``where``, cannot run again on all steps as one batch."""
    inside = dict(cell.named_modules(prefix=where))
    yield from (*problems_of_backward_hooks(inside), *problems_of_forward_hooks(inside))
    for name, module in inside.items():
        if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
            yield RANDOM_CELL.message(path=name, kind=type(module).__name__)
