"""Runs a loop in segments or by Newton's method, as one autograd function, or step by step where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_flatten, tree_leaves

from gradfree.chains.solving import offer_figure
from gradfree.convergence.outcome import coarsest_dtype
from gradfree.devices.costs import SHORTEST_SCAN
from gradfree.errors import CHANGED_IN_PLACE, STEP_CHANGED, ChainError
from gradfree.loops.compiled import Compiler, compiling, run_compiled, run_plain_loop
from gradfree.loops.recurrence import Loop, LoopMemory, Structure, builder
from gradfree.newton.iteration import NewtonRule
from gradfree.scans.first_step import NO_WARNING, OTHER_ENTRIES, FirstStep, Replacing, run_first_step
from gradfree.scans.knowledge import Knowledge, NewtonPass, ScanPass, Stopwatch, Way, by_newton
from gradfree.scans.layout import Cut
from gradfree.scans.narrow import WIDEST_ROW
from gradfree.scans.newton import DependentRowsError, NewtonSteps
from gradfree.scans.rules import LoopRule
from gradfree.scans.segments import LoopSegments, LoopSegmentsBackward, Ran
from gradfree.segments.rule import SegmentPlan
from gradfree.time.cell_chain import autocast_now
from gradfree.torchside.graph import walk
from gradfree.torchside.guards import check_finite, refuse_batched, refuse_other_values, refuse_second_derivatives
from gradfree.torchside.hooks import when_backward, without_hooks
from gradfree.torchside.private import is_simulated, keeps_graph, other_pass, transforms_active, version
from gradfree.torchside.surroundings import Surroundings


@dataclass
class SegmentedLoop:
    """One call of a loop that may run in segments, or all steps at once by Newton's method.

    Attributes:
        loop: the loop.
        rule: how it may run.
        known: what earlier calls have learnt.
        scratch: a module whose buffers and tensor attributes carry nothing from step to step; ``None``: there is none.
        forward: the forward pass, in segments or by Newton's method; set by :meth:`run`.
        backward: the backward pass; set by :meth:`run`.
    """

    loop: Loop
    rule: LoopRule
    known: Knowledge
    scratch: nn.Module | None = None
    forward: ScanPass = field(init=False)
    backward: ScanPass = field(init=False)

    def run(self) -> Any:
        """Return the final carry, and the outputs of all steps, stacked."""
        carry = [t for t in tree_leaves(self.loop.init) if isinstance(t, Tensor)]
        if torch.compiler.is_compiling() or transforms_active() or other_pass() is not None:
            return self.loop.run()
        is_short = self.loop.length < SHORTEST_SCAN and self._fixed_way() is None
        if not carry:
            if not is_short and any(leaf is not None for leaf in tree_leaves(self.loop.init)):
                self.known.warn(f"{self.loop.name} runs step by step: the step {OTHER_ENTRIES}. {NO_WARNING}")
            return self.loop.run()
        if is_short:
            return run_plain_loop(self.loop, self.known.compiler(Way(1, is_compiled=True)))
        like, length = _like(carry), self.loop.length
        memory, newton = self.known.memory(like), self.rule.newton_stopping(carry, length)
        in_segments, at_once = (
            [kind(self.loop.name, what, memory, length, like, "any") for what in ("forward", "backward")]
            for kind in (ScanPass, NewtonPass)
        )
        paused_cuts, paused_newton = ([each for each in both if each.is_paused] for both in (in_segments, at_once))
        may_cut, may_newton = self.rule.cut is not None and not paused_cuts, newton is not None and not paused_newton
        watch = self.known.stopwatch(in_segments, may_cut, may_newton, self._fixed_way())
        own, allowed = (at_once, may_newton) if watch.way.by_newton else (in_segments, may_cut)
        self.forward, self.backward = own
        plan = self._plan(watch.way, newton) if allowed else None
        if plan is None or plan.count < 2:
            return self._run_uncut(watch, [*paused_cuts, *paused_newton])
        found = self._run_cut(plan, watch)
        watch.forward_ended()
        return found

    def _fixed_way(self) -> Way | None:
        """Return how the options ask it to run; ``None``: as is fastest."""
        if self.rule.always_newton:
            return by_newton(self.loop.length)
        segments = None if self.rule.cut is None else self.rule.cut.segments
        return Way(segments) if isinstance(segments, int) else None

    def _plan(self, way: Way, newton: NewtonRule | None) -> SegmentPlan | None:
        """Return how to run all steps at once in an allowed way, or ``None`` to run them one by one."""
        if way.segments == 1:
            return None
        if way.by_newton:
            assert newton is not None
            return SegmentPlan(way.segments, 0, newton)
        assert self.rule.cut is not None
        rule = replace(self.rule.cut, segments=way.segments)
        return rule.cut(self.forward) if rule.should_cut(self.forward) else None

    def _run_uncut(self, watch: Stopwatch, paused: Sequence[ScanPass]) -> Any:
        loop, compiler = self.loop, self.known.compiler(watch.way)
        if compiler is not None:
            (carry, ys), first = run_compiled(loop, compiler)
            watch.forward_ended()
            watch.time_backward((carry, ys), first)
        elif watch.contest is not None:
            inputs = loop.inputs()
            first, y = loop.call(loop.init, inputs[0])
            carry, ys = loop.run(inputs[1:], first, [y])
            watch.forward_ended()
            watch.time_backward((carry, ys), first)
        else:
            carry, ys = loop.run()
        self._when_backward((carry, ys), [each.remember for each in paused])
        return carry, ys

    def _when_backward(self, outputs: Any, calls: list[Callable[[], None]]) -> None:
        """Call ``calls`` in the backward pass; without one, now."""
        if not calls:
            return
        needed = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        if needed:
            when_backward(needed, calls)
        else:
            for call in calls:
                call()

    def _run_cut(self, plan: SegmentPlan, watch: Stopwatch) -> Any:
        loop = self.loop
        first = run_first_step(loop, self.scratch is not None)
        if first.problem is None:
            found = self._try_segments(first, plan, watch.way)
            if found is not None:
                return self._connected(*found, watch)
        if first.problem is not None and not (first.may_be_cache and self.known.excuse_change()):
            self.give_up(first.problem, first.remedy)
        carry, ys = loop.run(loop.inputs()[1:], first.carry, [first.y])
        self._when_backward((carry, ys), [self.forward.remember])
        return carry, ys

    def give_up(self, problem: str, remedy: str) -> None:
        """Run the next calls step by step, and warn of the reason."""
        self.known.warn(f"{self.loop.name} runs step by step: the step {problem}. {remedy}")
        self.forward.pause()

    def _try_segments(self, first: FirstStep, plan: SegmentPlan, way: Way) -> tuple[LoopSegments, Ran] | None:
        """Run all segments until their borders agree.

        ``None``: they do not agree, or the step cannot run so; ``first`` has the reason of which to warn, if any.
        """
        loop = self.loop
        compiler = self.known.compiler(way)
        if way.by_newton:
            segments: LoopSegments = NewtonSteps(loop, first)
        else:
            assert self.rule.cut is not None
            cut = Cut.into(plan.count, loop.length)
            burn = self.forward.burnt = min(self.forward.burn_in(self.rule.cut), loop.length - cut.steps)
            segments = LoopSegments(loop, first, cut, burn, compiler)
        try:
            with _compiling(compiler, loop), _restored(self.scratch):
                ran, outcome = segments.solve(plan.stopping)
        except DependentRowsError:
            if self.rule.cut is not None:
                self.forward.pause()  # The other ways remain, so that there is nothing to warn of.
                return None
            first.problem = f"has a carry of more than {WIDEST_ROW} numbers that depend on each other"
            first.remedy = "Use engine='shooting', or 'backprop', which is the plain loop without this warning."
            return None
        except (torch.OutOfMemoryError, ChainError):
            raise
        except RuntimeError as error:  # All that vmap raises for steps that it cannot run.
            first.problem = _reason(error)
            return None
        if change := Surroundings(loop.step, self.scratch is None).change(first.surroundings):
            raise STEP_CHANGED.error(name=loop.name, what=change)
        if different := segments.differences(ran):
            first.problem = f"gives results of other {different} where it runs at once with other steps"
            first.remedy = _REMEDIES[different]
            return None
        self.forward.outcome, self.forward.plan = outcome, plan
        return (segments, ran) if outcome.settled else None

    def _connected(self, segments: LoopSegments, ran: Ran, watch: Stopwatch) -> Any:
        """Return the results of a run, as outputs of an autograd function where they need a gradient."""
        outputs = segments.outputs(ran)
        if any(t.requires_grad for t in outputs):
            inputs = [*Structure.of(self.loop.init)[1]]
            inputs += [self.loop.xs[n] for n in segments.x_at]
            inputs += [*segments.first.leaves, *segments.first.inner]
            call = _Call(self, segments, ran, watch, autocast_now(inputs[0]), [(t, version(t)) for t in inputs])
            outputs = list(_SegmentsFunction.apply(call, outputs, *inputs))
        else:
            self.forward.remember()
        return segments.tree(outputs)


@dataclass
class _Call:
    """What the backward pass needs."""

    owner: SegmentedLoop
    segments: LoopSegments
    ran: Ran
    watch: Stopwatch
    autocast: torch.autocast
    versions: Sequence[tuple[Tensor, int]]

    def gradients(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of all inputs, for the cotangents of the outputs."""
        owner, this, segments = self.owner, self.owner.backward, self.segments
        this.burnt = segments.burn
        this.plan, this.outcome = owner.forward.plan, None
        solver = segments.backward(self.ran, cotangents)
        found = self._solved(solver)
        gradients = self._by_plain_loop(cotangents) if found is None else solver.gradients(found)
        for each in (owner.forward, this):
            each.remember()
            each.report(partial(offer_figure, owner.loop.name))
        return gradients

    def _solved(self, solver: LoopSegmentsBackward) -> Any:
        """Return what ``solver`` finds; ``None`` if the sweeps do not settle, or the backward pass cannot run so."""
        owner, this = self.owner, self.owner.backward
        assert this.plan is not None
        try:
            with _compiling(owner.known.compiler(self.watch.way), owner.loop):
                found, this.outcome = solver.solve(this.plan.stopping)
                if this.outcome.settled:
                    return found
                return solver.solve_in_order() if self.segments.cut.steps > 1 else None
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._refuse_changes()
            owner.give_up(_reason(error), self.segments.first.remedy)
            return None

    def _by_plain_loop(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients from a run of the plain loop, from the same inputs."""
        self._refuse_changes()
        loop, segments, first = self.owner.loop, self.segments, self.segments.first
        init, spec = tree_flatten(loop.init)
        init, xs, others = ([_copy(t) for t in leaves] for leaves in (init, loop.xs, first.inner))
        replacing = Replacing(dict(zip(map(id, first.inner), others, strict=True)))
        with torch.enable_grad(), self.autocast, replacing:
            out = replace(loop, init=builder(spec)(init), xs=xs).run()
        outputs = [t for t in tree_leaves(out) if t is not None]
        assert self.owner.forward.plan is not None
        tolerance = self.owner.forward.plan.stopping.tolerance
        for now, before in zip(outputs, segments.outputs(self.ran), strict=True):
            if before.is_floating_point():
                rounding = max(min(10 * torch.finfo(before.dtype).eps ** 0.5, 0.1), 10 * tolerance)
                message = STEP_CHANGED.message(name=loop.name, what="gives other results in the backward pass")
                refuse_other_values(now.detach(), before.detach(), rounding, message)
        live = [(o, e) for o, e in zip(outputs, cotangents, strict=True) if o.requires_grad and e is not None]
        targets = [*(init[n] for n in segments.carry.at), *(xs[n] for n in segments.x_at), *first.leaves, *others]
        wanted = [t for t in targets if t.requires_grad]
        reached = {id(leaf) for leaf in walk(o for o, _ in live).leaves}
        # More tensors alone may be weights that have been unfrozen since.
        if reached - {id(t) for t in wanted} and first.reached - reached:
            raise STEP_CHANGED.error(name=loop.name, what="takes other tensors in the backward pass")
        with without_hooks(first.leaves):
            found = torch.autograd.grad([o for o, _ in live], wanted, [e for _, e in live], allow_unused=True)
        by_id = dict(zip(map(id, wanted), found, strict=True))
        return [by_id.get(id(t)) for t in targets]

    def _refuse_changes(self) -> None:
        """Raise if a tensor that the loop would read again has been changed in place since the forward pass."""
        if any(version(t) != before for t, before in self.versions):
            raise CHANGED_IN_PLACE.error(where=self.owner.loop.name)


class _Context(FunctionCtx):
    call: _Call


class _SegmentsFunction(torch.autograd.Function):
    """(initial carry, inputs, tensors from outside) -> (final carry, outputs)."""

    @staticmethod
    def forward(ctx: _Context, call: _Call, outputs: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Only so that torch notices a second backward pass without retain_graph.
        ctx.save_for_backward(torch.empty(0))
        found = tuple(t.detach() for t in outputs)
        ctx.mark_non_differentiable(*(f for f, t in zip(found, outputs, strict=True) if not t.requires_grad))
        return found

    @staticmethod
    def backward(ctx: _Context, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        call, _ = ctx.call, ctx.saved_tensors  # type: ignore[attr-defined]
        where = call.owner.loop.name
        refuse_batched(cotangents, where)
        check_finite(cotangents, where)
        call.watch.backward_started()
        given = call.gradients(cotangents)
        if not keeps_graph():
            call.ran.free()
        call.watch.backward_ended()
        return None, None, *given


_REMEDIES = {
    "dtypes": "Give numbers in xs, tensors without dimensions, the dtype of the carry.",
    "shapes": "One of its functions is wrong under torch.func.vmap; use another one.",
}


def _like(carry: Sequence[Tensor]) -> Tensor:
    """Return a tensor (rows, units) without values, of the carry's largest part and coarsest dtype."""
    part = max(carry, key=Tensor.numel)
    rows = len(part) if part.dim() > 1 else 1
    like = torch.empty((), dtype=coarsest_dtype(carry, torch.get_default_dtype()), device=part.device)
    return like.expand(rows, max(1, part.numel() // max(1, rows)))


@contextmanager
def _restored(module: nn.Module | None) -> Iterator[None]:
    """Restore buffers and tensor attributes of ``module`` afterwards: those that segments leave are of no use."""
    modules = [] if module is None else list(module.modules())
    before = [(dict(vars(each)), dict(each._buffers)) for each in modules]
    try:
        yield
    finally:
        for each, (attributes, buffers) in zip(modules, before, strict=True):
            vars(each).update((name, value) for name, value in attributes.items() if isinstance(value, Tensor))
            each._buffers.update(buffers)


def _compiling(compiler: Compiler | None, loop: Loop) -> AbstractContextManager[None]:
    return nullcontext() if compiler is None else compiling(loop.name)


def _reason(error: Exception) -> str:
    """Return why a step cannot run in segments, in words that follow "the step"."""
    if "randomness" in str(error):  # Of an option of vmap.
        return "draws random numbers, which can be drawn before, in xs"
    first_line = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return f"cannot run at once with other steps ({first_line})"


def _copy(t: Any) -> Any:
    return t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t


def run_loop(rule: LoopRule, loop: Loop, memory: LoopMemory, scratch: nn.Module | None) -> tuple[Any, Any]:
    """Run ``loop`` as ``rule`` allows, see :class:`SegmentedLoop`; as it is where its inputs have no values."""
    if any(isinstance(x, Tensor) and is_simulated(x) for x in loop.xs):
        return loop.run()
    if memory.known is None:
        memory.known = Knowledge(memory.tensors, memory.compiler)
    return SegmentedLoop(loop, rule, memory.known, scratch).run()
