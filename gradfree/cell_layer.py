"""Any recurrent cell as a layer, and as a chain in time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradfree.cells import State
from gradfree.chain import ChainError, ChainGradients, refuse
from gradfree.graph import (
    check_finite,
    check_made_finite,
    may_write,
    refuse_second_derivatives,
    saved,
    walk,
    without_hooks,
)
from gradfree.scan import plus, times
from gradfree.sharding import sharded
from gradfree.site import Removable, Site, hooked
from gradfree.solving import solve
from gradfree.time_chain import CellChain, Split, TimeChain
from gradfree.unsaved import Unsaved

if TYPE_CHECKING:
    from gradfree.engine import Engine


class CellLayer(nn.Module):
    """Run a cell over a sequence; an engine finds the layer as a chain in time.

    Put ``nn.GRUCell``, ``nn.LSTMCell``, ``nn.RNNCell`` or a cell of your own in it, in place of the loop over steps.

    Args:
        cell: called as ``cell(x, state)`` with ``x`` (B, I); returns the next state, a tensor (B, H) or a tuple of
            them, the first of which is the output.
        batch_first: whether sequences are (B, T, ·) rather than (T, B, ·).
    """

    def __init__(self, cell: nn.Module, batch_first: bool = False):
        super().__init__()
        self.cell = cell
        self.batch_first = batch_first

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return the outputs of all steps and the final state.

        Args:
            x: (T, B, I), or (B, T, I) with ``batch_first``.
            state: the initial state; may be left out if the cell has a ``hidden_size``: zeros.

        Raises:
            ValueError: no steps, or no initial state where the cell does not tell its size.
        """
        x = x.transpose(0, 1) if self.batch_first else x
        if x.dim() != 3 or len(x) == 0:
            raise ValueError(f"a sequence must be (T, B, I) with at least one step, not {tuple(x.shape)} (time first).")
        single = not isinstance(state, tuple) and not (state is None and isinstance(self.cell, nn.LSTMCell))
        parts = self._zeros(x) if state is None else (state,) if single else state
        out, *final = self.unroll(x, parts)
        return out.transpose(0, 1) if self.batch_first else out, final[0] if single else tuple(final)

    def unroll(self, x: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs (T, B, H) and the parts of the final state, from those of the initial one."""
        steps = steps_of(self.cell, x, parts)
        return [torch.stack([step[0] for step in steps]), *steps[-1]]

    def _zeros(self, x: Tensor) -> tuple[Tensor, ...]:
        size = getattr(self.cell, "hidden_size", None)
        if size is None:
            raise ValueError(f"{type(self.cell).__name__} has no hidden_size: pass the initial state.")
        return (x.new_zeros(x.shape[1], size),) * (2 if isinstance(self.cell, nn.LSTMCell) else 1)


def steps_of(cell: nn.Module, x: Tensor, parts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return the state behind every step, part by part."""
    steps: list[tuple[Tensor, ...]] = []
    for fed in x:
        parts = _apply(cell, fed, parts)
        steps.append(tuple(parts))
    return steps


def _apply(cell: nn.Module, x: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    state = cell(x, parts[0] if len(parts) == 1 else tuple(parts))
    return state if isinstance(state, tuple) else (state,)


class UnrolledChain(TimeChain):
    """A layer of any cell: all steps as one batch through the cell, with autograd's products.

    Args:
        cell: the cell.
        x: (T, B, I).
        before: the states before each step, part by part, (T, B, ·).
        parameters: the cell's.
        wanted: whether the gradient of each of them is needed.
        memory: what is kept from pass to pass.
        where: what the cell is called in messages.
    """

    def __init__(
        self,
        cell: nn.Module,
        x: Tensor,
        before: Sequence[Tensor],
        parameters: Sequence[Tensor],
        wanted: Sequence[bool],
        memory: dict[str, Tensor],
        where: str,
    ):
        super().__init__(len(x), before[0], memory, "0")
        self.diagonal = [0.0] * len(before)
        self.cell, self.parameters, self.shape = cell, parameters, x.shape[:2]
        # Autograd passes over parameters that have been frozen since the forward pass.
        self.trained = [p for p, want in zip(parameters, wanted, strict=True) if want and p.requires_grad]
        if any(p is not own for p, own in zip_longest(parameters, cell.parameters())):
            raise ChainError(
                f"{where} has other parameters in the backward pass than in the forward pass "
                "(torch.func.functional_call gives them back before), but an engine runs it in both. Load the "
                "parameters into the model, or use nn.GRUCell, nn.LSTMCell or nn.RNNCell."
            )
        with torch.enable_grad():
            self.x = x.detach().requires_grad_(x.is_floating_point())
            self.before = [part.detach().requires_grad_() for part in before]
            after = _apply(cell, self.x.flatten(0, 1), [part.flatten(0, 1) for part in self.before])
            self.after = [part.unflatten(0, self.shape) for part in after]
        known = {id(t) for t in (self.x, *self.before, *parameters)}
        graph = walk(self.after)
        if any(id(leaf) not in known for leaf in graph.leaves):
            raise ChainError(
                f"{where} uses a tensor that needs a gradient and is neither its input nor one of its "
                "parameters. Register it on the cell."
            )
        self._writes = may_write(graph.nodes)

    def crossed(self, delta: State, factors: Split) -> State:
        """Return δ_t (F_t - K_t) for t = 2..T."""
        pulled = self._pull(delta, self.before, keep=True)
        whole = (plus(v, times(d, rest)) for v, d, rest in zip(pulled, delta, factors.rest, strict=True))
        return tuple(None if v is None else v[1:] for v in whole)

    def backpropagate(self, direct: State) -> ChainGradients:
        """Return the exact gradients, with one small graph a step for δ."""
        delta = [torch.zeros_like(a) if e is None else e.clone() for e, a in zip(direct, self.after, strict=True)]
        for t in range(len(self) - 1, 0, -1):
            with torch.enable_grad():
                before = [part[t].detach().requires_grad_() for part in self.before]
                after = _apply(self.cell, self.x[t].detach(), before)
            pulled = torch.autograd.grad(after, before, [self._given(part[t]) for part in delta], allow_unused=True)
            for part, v in zip(delta, pulled, strict=True):
                part[t - 1] += 0.0 if v is None else v
        return self.gradients(tuple(delta))

    def gradients(self, delta: State) -> ChainGradients:
        """Return δ_t ∂f_t/∂θ summed over t, the inputs' gradients, and those of the initial state."""
        x = [self.x] if self.x.requires_grad else []
        with without_hooks(self.trained):
            pulled = iter(self._pull(delta, [*self.before, *x, *self.trained], keep=False))
        initial = tuple(None if (g := next(pulled)) is None else g[0] for _ in self.before)
        of_x = next(pulled) if x else None
        of_trained = {id(p): g for p, g in zip(self.trained, pulled, strict=True)}
        return ChainGradients(initial, [of_x], [of_trained.get(id(p)) for p in self.parameters])

    def _pull(self, delta: State, targets: Sequence[Tensor], keep: bool) -> tuple[Tensor | None, ...]:
        live = [
            (a, self._given(d)) for a, d in zip(self.after, delta, strict=True) if d is not None and a.requires_grad
        ]
        after, cotangents = zip(*live, strict=True)
        return torch.autograd.grad(after, targets, cotangents, retain_graph=keep, allow_unused=True)

    def _given(self, delta: Tensor) -> Tensor:
        """Return ``delta`` for a graph of the cell to start from, a copy if it must not be changed."""
        return delta.clone() if self._writes else delta


class Unrolled(Site):
    """A :class:`CellLayer`."""

    looks_like = "a gradfree.CellLayer"

    @staticmethod
    def accepts(module: nn.Module) -> bool:
        """Tell whether ``module`` is a :class:`CellLayer`."""
        return isinstance(module, CellLayer)

    is_evident = accepts

    @property
    def has_residual(self) -> bool:
        """Whether the cell has a gate that is known."""
        return _closed_form(self._layer.cell) in ("GRU", "LSTM")

    def means(self) -> dict[str, tuple[int, ...]]:
        """Return a vector's shape: of the gate of h or, for LSTM, of c."""
        part = int(_closed_form(self._layer.cell) == "LSTM")
        return {f"0.{part}": (self._layer.cell.hidden_size,)}  # type: ignore[dict-item]

    @staticmethod
    def holds_engine(module: nn.Module) -> bool:
        """Tell whether the layer's loop over steps is replaced."""
        return isinstance(module, CellLayer) and "unroll" in vars(module)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the cell."""
        yield from sharded(self.inside)
        if self.holds_engine(self._layer):
            yield f"{self.path} has an engine attached already: call detach() on its handle first."
        if type(self._layer).unroll is not CellLayer.unroll:
            yield f"{self.path} is a {type(self._layer).__name__} with an unroll of its own, which an engine replaces."
        for name, module in self._layer.cell.named_modules():
            where = f"{self.path}.cell.{name}" if name else f"{self.path}.cell"
            if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
                yield (
                    f"{where} has hooks: an engine runs the cell without a graph, "
                    "so what they see has no gradient. Remove them while an engine is attached."
                )
            if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
                yield (
                    f"{where} is a {type(module).__name__}: an engine runs the cell again in the backward pass, which "
                    "would draw other masks or count statistics twice. Put it outside the cell."
                )

    def record(self, engine: Engine, memory: dict[str, Tensor], lean: bool) -> list[Removable]:
        """Replace the layer's loop over steps, which keeps nothing but the states."""
        recorder = CellRecorder(engine, self, self._layer, memory)
        self._layer.unroll = recorder.unroll  # type: ignore[method-assign, assignment]
        return [recorder, Unsaved(self._layer, {"unroll"})]

    @property
    def _layer(self) -> CellLayer:
        return self.blocks[self.path]  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"a layer of {type(self._layer.cell).__name__}, in time"


class CellRecorder:
    """Stands in for a :class:`CellLayer`'s loop over steps."""

    def __init__(self, engine: Engine, site: Site, layer: CellLayer, memory: dict[str, Tensor]):
        self.engine, self.layer, self.memory = engine, layer, memory
        self.path, self.inside, self.solved = site.path, site.inside, site.solved
        self.where = f"{site.path}.cell".removeprefix(".")
        self.compared: Marks = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what the cell held when it was last compared: that of a copy is another."""
        return {**self.__dict__, "compared": []}

    def remove(self) -> None:
        """Give the layer its own loop back."""
        del self.layer.unroll

    def unroll(self, x: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what the layer's own loop returns."""
        if not torch.is_grad_enabled():
            return type(self.layer).unroll(self.layer, x, parts)
        refuse(sharded(self.inside))
        refuse(hooked(self.inside))
        if not all(part.is_floating_point() for part in parts):
            raise ChainError(
                f"{self.where} was given a state of {', '.join(str(part.dtype) for part in parts)}: an engine needs "
                "states of real numbers. Keep counters and the like outside of the cell."
            )
        return _UnrollFunction.apply(self, len(parts), x, *parts, *self.layer.cell.parameters())

    def unrolled(
        self,
        x: Tensor,
        states: Sequence[Tensor],
        first: Sequence[Tensor],
        parameters: Sequence[Tensor],
        wanted: Sequence[bool],
        held: Marks,
    ) -> UnrolledChain:
        """Return the chain of a pass of a cell that is not known.

        Args:
            x: (T, B, I).
            states: behind each step, part by part, (T, B, ·).
            first: the initial state, (B, ·).
            parameters: the cell's, in the pass.
            wanted: which of them needed a gradient then.
            held: what :func:`_held` was then.

        Raises:
            ChainError: the cell gives other states than in the pass.
        """
        before = [torch.cat([f.unsqueeze(0), s[:-1]]) for f, s in zip(first, states, strict=True)]
        chain = UnrolledChain(self.layer.cell, x, before, parameters, wanted, self.memory, self.where)
        # To compare is a sync. Once is enough to find a cell that draws random numbers, counts or mixes rows, which one
        # step alone does not tell; until something of the cell changes: its mode, a rate, a mask that it keeps.
        now = _held(self.layer.cell)
        if not (_same(held, now) and _same(held, self.compared)):
            if not all(map(_close, chain.after, states)):
                raise ChainError(
                    f"{self.where} gives other states when it runs on all steps as one batch: an engine needs a "
                    "cell whose output depends on its own row of input and state alone, without random numbers or "
                    "counters, and that is not changed between the forward and the backward pass."
                )
            self.compared = now if len(x) > 1 else []
        return chain


class _Context(FunctionCtx):
    recorder: CellRecorder
    parts: int
    mode: str | None
    held: Marks
    autocast: torch.autocast
    needs_input_grad: tuple[bool, ...]


class _UnrollFunction(torch.autograd.Function):
    """(x, initial state, parameters) -> (outputs, final state)."""

    @staticmethod
    def forward(ctx: _Context, recorder: CellRecorder, parts: int, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        cell = recorder.layer.cell
        ctx.recorder, ctx.parts, ctx.mode = recorder, parts, _closed_form(cell)
        kind = x.device.type
        ctx.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        before = _marks([x, *rest, *cell.buffers()])
        steps = steps_of(cell, x, rest[:parts])
        if not _same(before, _marks([x, *rest, *cell.buffers()])):
            raise ChainError(
                f"{recorder.where} changes its input, its state, a parameter or a buffer: an engine runs it again in "
                "the backward pass, which would change them once more. Compute new tensors instead, and keep "
                "statistics outside of the cell."
            )
        ctx.held = _held(cell)
        states = [torch.stack(part) for part in zip(*steps, strict=True)]
        ctx.save_for_backward(x, *rest, *states)
        ctx.set_materialize_grads(False)
        return states[0], *steps[-1]

    @staticmethod
    def backward(ctx: _Context, cotangent: Tensor | None, *finals: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        recorder, parts = ctx.recorder, ctx.parts
        check_finite((cotangent, *finals), recorder.path)
        x, *rest = saved(ctx, recorder.path or "the cell layer")
        autocast = ctx.autocast
        if ctx.mode is not None:
            # As in torch's recurrent modules: in the weights' precision, whatever autocast ran the cell in.
            dtype = rest[parts].dtype
            x, *rest = (tensor.to(dtype) for tensor in (x, *rest))
            autocast = torch.autocast(x.device.type, enabled=False)
        first, parameters, states = rest[:parts], rest[parts:-parts], rest[-parts:]
        direct = tuple(
            _with_final(e, final, state)
            for e, final, state in zip((cotangent, *[None] * (parts - 1)), finals, states, strict=True)
        )
        wanted = ctx.needs_input_grad[3 + parts :]
        chain: TimeChain
        with autocast:
            if ctx.mode is not None:
                chain = CellChain(ctx.mode, x, states[0], first, parameters, [True, *wanted], recorder.memory, "0")
            else:
                chain = recorder.unrolled(x, states, first, parameters, wanted, ctx.held)
            gradients = solve(recorder.engine, chain, direct, recorder.path)
        given = *gradients.inputs, *gradients.initial, *gradients.parameters
        check_made_finite(given, recorder.path or "the cell layer")
        recorder.solved.add(recorder.path)
        return None, None, *given


def _with_final(e: Tensor | None, final: Tensor | None, like: Tensor) -> Tensor:
    e = torch.zeros_like(like) if e is None else e.to(like.dtype, copy=True)
    if final is not None:
        e[-1] += final
    return e


Marks = list[tuple[object, int]]
"""What tells whether values are still the same: their identities, of tensors also the counts of changes in place."""


def _marks(values: Iterable[object]) -> Marks:
    return [
        (weakref.ref(v), 0 if v.is_inference() else v._version) if isinstance(v, Tensor) else (v, 0) for v in values
    ]


def _same(marks: Marks, others: Marks) -> bool:
    return len(marks) == len(others) and all(a is b and m == n for (a, m), (b, n) in zip(marks, others, strict=True))


def _held(cell: nn.Module) -> Marks:
    """Return marks of what the cell's output may depend on besides its arguments and parameters."""
    values = [value for module in cell.modules() for value in vars(module).values()]
    parts = [part for value in values for part in (value.values() if isinstance(value, dict) else [value])]
    return _marks(part for part in parts if not isinstance(part, nn.Parameter))


def _close(again: Tensor, state: Tensor) -> bool:
    tolerance = torch.finfo(state.dtype).eps ** 0.5
    return torch.allclose(again.to(state.dtype), state, rtol=10 * tolerance, atol=tolerance, equal_nan=True)


def _closed_form(cell: nn.Module) -> str | None:
    """Return the name of the cell if it is one of torch's own and nothing has changed what it computes."""
    as_made = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    if "forward" in vars(cell) or cell._forward_pre_hooks or cell._forward_hooks or list(cell._parameters) != as_made:
        return None
    names: dict[type, str] = {nn.GRUCell: "GRU", nn.LSTMCell: "LSTM"}
    if type(cell) is nn.RNNCell:
        return f"RNN_{cell.nonlinearity.upper()}"
    return names.get(type(cell))
