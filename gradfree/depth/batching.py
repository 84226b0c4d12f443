"""Which blocks of a chain run without a graph and are pulled through in batches: looked at, tried once, and kept."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from gradfree.algebra.cotangents import Cotangent, is_number, plus
from gradfree.batched.alike import Held, likeness, slots
from gradfree.batched.batch import all_close
from gradfree.batched.costs import pays
from gradfree.batched.plan import BatchPlan, Setting
from gradfree.batched.replay import hindrance, keeps_tensors, left_as_it_was
from gradfree.batched.stacks import Stack, Stacks
from gradfree.depth.batched_chain import BatchedChain, Group, Ran
from gradfree.depth.chain import DepthChain
from gradfree.depth.link import Link, walking
from gradfree.depth.ports import Port, port_of
from gradfree.errors import ChainError
from gradfree.torchside.graph import walk
from gradfree.torchside.hooks import without_hooks

Batched = Literal["auto"] | bool
"""Whether blocks that are alike are pulled through in batches: where it pays, always or never."""

_PLANS = 8
"""How many kinds of passes are remembered beside the current one."""
_BYTES = 2**28
"""How much of parameters and states is copied into one batch at most: a group that has more makes several."""


class PassToBatch(Protocol):
    """What a recorded pass has to tell."""

    links: list[Any]
    given: list[Tensor | None]
    numbers: dict[int, int]
    uncut: bool
    changed: set[int]


class Batching:
    """Batches of the blocks of one chain.

    Args:
        blocks: by path.
        batched: "auto" or True.
        needs_residual: whether the engine asks for the residual path.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], batched: Batched, needs_residual: bool):
        self.blocks, self.batched, self.needs_residual = blocks, batched, needs_residual
        self.told = ""
        """What has been found, in a few words."""
        self._changing = False
        """Whether a pass that might have shown what can be batched has changed what the blocks hold."""
        odd = {path: "forward" in vars(block) or type(port_of(block)) is not Port for path, block in blocks.items()}
        self._odd = {path for path, is_odd in odd.items() if is_odd}
        self._look()

    def _look(self) -> None:
        """Note where everything is that passes look at: to go through all modules in each would take too long."""
        blocks = self.blocks
        self._slots = {path: list(slots(block)) for path, block in blocks.items()}
        self._flat = [slot for own in self._slots.values() for _, slot in own]
        ends = torch.tensor([len(own) for own in self._slots.values()]).cumsum(0).tolist()
        self._ranges = dict(zip(self._slots, pairwise([0, *ends]), strict=True))
        numbered = iter(enumerate(self._flat))
        self._places = {path: list(islice(numbered, len(own))) for path, own in self._slots.items()}
        inside = [m for block in blocks.values() for m in block.modules()]
        self._modal = [m for m in inside if not isinstance(m, _MODELESS)]
        roots = set(blocks.values())
        self._hooks = [h for m in inside if m not in roots for h in (m._forward_hooks, m._forward_pre_hooks)]
        self._plans: dict[Hashable, BatchPlan] = {}
        self._held = Held(inside)
        self._layers = self._held.layers

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the plans: a copy makes its own."""
        return {**self.__dict__, "_plans": {}}

    @property
    def is_whole(self) -> bool:
        """Whether in passes of some kind all blocks go without a graph."""
        return any(plan.whole for plan in self._plans.values())

    def begin(self, state: Tensor, path: str) -> Setting | None:
        """Return how a pass that starts from ``state`` at ``path`` is to run; ``None``: all blocks with graphs."""
        hooked = any(self._hooks) or _has_any_global_hook()
        if hooked or torch.is_anomaly_enabled() or torch.compiler.is_compiling() or _saves_elsewhere():
            return None
        if self._held.layers != self._layers:
            self._look()
        tensors = [own[key] for own, key in self._flat]
        if not all(map(_is_leaf, tensors)):  # functional_call's, of weights that were computed.
            return None
        kind = state.device.type
        autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        first = [(t.dtype, t.device) for t in tensors[:1]]
        trained, held = tuple([t.requires_grad for t in tensors]), self._held.attributes
        key: Hashable = (
            path,
            trained,
            tuple([m.training for m in self._modal]),
            (*autocast, state.dim(), state.dtype, state.device, *first),
            held,
        )
        if key not in self._plans:
            # A number that changes in every pass makes each of them a pass of another kind.
            self._plans = dict(list(self._plans.items())[-_PLANS:]) | {key: self._plan()}
        return Setting(self._plans[key], tensors, self._places, trained, held, autocast, state)

    def _plan(self) -> BatchPlan:
        reasons: dict[str, str] = {}
        alike: dict[Hashable, list[str]] = {}
        for path, block in self.blocks.items():
            why = "it has a port or a forward of its own" if path in self._odd else hindrance(block)
            if why is None:
                alike.setdefault(likeness(block), []).append(path)
            else:
                reasons[path] = why
        for paths in alike.values():
            if len(paths) == 1:
                reasons[paths[0]] = "no other block is like it"
        return BatchPlan([paths for paths in alike.values() if len(paths) > 1], reasons)

    def chain(self, setting: Setting, recorded: PassToBatch, chain: DepthChain) -> DepthChain:
        """Return what the engine sees: ``chain``, or one whose blocks are pulled through in batches.

        Args:
            setting: of the pass.
            recorded: the pass.
            chain: its links; those that ran without a graph are no more than a :class:`Ran`.

        Raises:
            ChainError: parameters have changed since the pass, or blocks cannot be batched that must be.
        """
        ran = {i for i, link in enumerate(chain.links) if isinstance(link, Ran)}
        if not setting.is_as_it_was:
            if self.batched is True and setting.plan.reasons:
                raise _not_batched(setting.plan.reasons)
            if not ran:
                return chain  # Autograd refuses what it needs.
            raise ChainError(
                f"a parameter or buffer of the blocks from {chain.links[0].path} on was changed in place between the "
                "forward and the backward pass, which needs it. Step the optimizer after the backward pass."
            )
        if not setting.plan.settled:
            if self._held.attributes != setting.held and not self._changing:
                # Something may be set in the first pass and stay.
                self._changing = True
                return chain
            self._settle(setting, recorded)
        columns = setting.columns
        links = _marked(recorded, chain.links) if columns else self._batched(setting, recorded, chain.links, ran)
        if not links:
            return chain
        groups = [
            group
            for n, paths in enumerate(setting.plan.groups)
            for group in self._groups(_of(links, paths), setting, {} if columns is None else columns.groups[n])
        ]
        result = BatchedChain(chain, groups, recorded.numbers, setting.initial, columns)
        return result.with_graphs if _cut(setting, recorded, chain.links) else result

    def _batched(self, setting: Setting, recorded: PassToBatch, links: Sequence[Any], ran: set[int]) -> dict[int, Ran]:
        """Return what goes in batches of a pass block by block, of which ``ran`` have run without a graph."""
        # Also those with graphs, of passes that began before it was known: what a pass gives must not depend on that.
        chosen = [i for i, link in enumerate(links) if i in ran or self._may_be_batched(setting, link)]
        return {i: self._ran(setting, recorded, i, links[i]) for i in chosen}

    def _may_be_batched(self, setting: Setting, link: Any) -> bool:
        return setting.is_batched(link.path) and link.path not in setting.apart

    def _ran(self, setting: Setting, recorded: PassToBatch, index: int, link: Any) -> Ran:
        start, end = self._ranges[link.path]
        known, changed = setting.plan.residual.get(link.path, 0.0), index in recorded.changed
        if isinstance(link, Ran):
            return Ran(link.path, link.block, link.out, link.x, setting.tensors[start:end], known, changed)
        x, out = _entered(setting, recorded, index).detach(), link.out.detach()
        return Ran(link.path, link.block, out, x, setting.tensors[start:end], known, changed)

    def parts(self, setting: Setting) -> list[tuple[Sequence[Tensor], float]]:
        """Return of each block its tensors, and what its residual path carries, where none has a graph."""
        residual = setting.plan.residual
        return [(setting.tensors[start:end], residual[path]) for path, (start, end) in self._ranges.items()]

    def stack(self, setting: Setting) -> Stacks:
        """Stack the trained parameters of all blocks, in a pass in which each runs once, without a graph."""
        groups = []
        for paths in setting.plan.groups:
            tensors = [setting.tensors[slice(*self._ranges[path])] for path in paths]
            names = [name for name, _ in self._slots[paths[0]]]
            groups.append(dict(zip(names, zip(*tensors, strict=True), strict=True)))
        setting.columns = Stacks(groups)
        return setting.columns

    def _groups(self, links: Mapping[int, Ran], setting: Setting, columns: Mapping[str, Stack]) -> Iterator[Group]:
        """Yield links that are alike, in groups that are not too large for one batch."""
        if not links:
            return
        one = next(iter(links.values()))
        trained = setting.trained[slice(*self._ranges[one.path])]
        names = dict(zip((name for name, _ in self._slots[one.path]), trained, strict=True))
        each = sum(t.numel() * t.element_size() for t in (*one.tensors, one.x, one.out))
        indices, most = list(links), max(1, _BYTES // max(1, each))
        for start in range(0, len(indices), most):
            chosen = indices[start : start + most]
            rows = range(start, start + len(chosen))
            yield Group([links[i] for i in chosen], chosen, names, setting.autocast, columns, rows)

    def _settle(self, setting: Setting, recorded: PassToBatch) -> None:
        """Find out, of a pass whose blocks all have graphs, which can do without.

        Raises:
            ChainError: one that must cannot.
        """
        plan, links = setting.plan, list(recorded.links)
        reasons = plan.reasons | setting.apart
        cut = _cut(setting, recorded, links)
        if self._held.attributes != setting.held:
            cut = _CHANGES  # Nor is it tried: that would change it once more.
        for paths in plan.groups:
            mine = {i: link for i, link in _of(dict(enumerate(links)), paths).items() if link.path not in reasons}
            why = cut or self._why_not(setting, mine, recorded)
            if why is None:
                for link in mine.values():
                    plan.residual[link.path] = _number(link)
            else:
                reasons.update((link.path, why) for link in mine.values())
        each = [link.path for link in links] == list(self.blocks)
        plan.settled, plan.whole = True, each and plan.residual.keys() == self.blocks.keys()
        left = {link.path: reasons[link.path] for link in links if link.path not in plan.residual}
        if self.batched is True and left:
            plan.settled, plan.whole, plan.residual = False, False, {}
            raise _not_batched(left)
        self.told = f"{len(plan.residual)} in batches" + "".join(
            f"; {path}{' and others' if len(left) > 1 else ''} not: {why}" for path, why in list(left.items())[:1]
        )

    def _why_not(self, setting: Setting, links: Mapping[int, Link], recorded: PassToBatch) -> str | None:
        """Return why links that are alike cannot be batched, or should not be; ``None`` if they can."""
        if len(links) < 2:
            return "no other block is like it"
        if any(not _entered(setting, recorded, i).is_floating_point() for i in links):
            return "what enters it are no real numbers"
        if self.needs_residual and any(not is_number(f, f) for f in map(_factor, links.values())):
            return "its residual path carries other numbers in each pass"
        one = next(iter(links.values()))
        nodes = len(walk([one.out]).nodes)
        parameters = sum(p.numel() for p in one.parameters.values())
        if self.batched == "auto" and not pays(one.out.device.type, nodes, parameters, nodes * one.out.numel()):
            return "a batch of such blocks would take longer"
        ran = {i: self._ran(setting, recorded, i, link) for i, link in links.items()}
        first = next(iter(ran.values()))
        try:
            if keeps_tensors(first.block, first.x, setting.autocast):
                return "it keeps tensors from inside, and a loss on them would have no gradient"
            for group in self._groups(ran, setting, {}):
                with left_as_it_was(group.links[0].block) as changed:
                    agrees = _agrees(group, [links[i] for i in group.indices], recorded.numbers)
                if changed:
                    return _CHANGES
                if not agrees:
                    return "run in a batch it gives something else"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Whatever torch, or the block, says to being run in a batch.
            return f"it does not run in a batch ({(str(error).strip() or type(error).__name__).splitlines()[0]})"
        return None


_is_leaf = attrgetter("is_leaf")
_CHANGES = "it changes what it holds each time it runs"
_MODELESS = (nn.Linear, nn.LayerNorm, nn.GELU, nn.ReLU, nn.Tanh, nn.SiLU, nn.Sigmoid, nn.Identity, nn.Conv1d, nn.Conv2d)
"""Layers that do the same in training and in evaluation."""


def _saves_elsewhere() -> bool:
    """Tell whether what autograd saves goes to somebody's hooks, such as those of a checkpoint around the model."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _not_batched(reasons: Mapping[str, str]) -> ChainError:
    path, why = next(iter(reasons.items()))
    return ChainError(
        f"batched=True, but {path} cannot be pulled through in a batch: {why}. Use batched='auto', which batches what "
        "can be and where it pays."
    )


def _of(links: Mapping[int, Any], paths: Sequence[str]) -> dict[int, Any]:
    """Return those of ``links`` whose paths are among ``paths``."""
    chosen = set(paths)
    return {i: link for i, link in links.items() if link.path in chosen}


def _marked(recorded: PassToBatch, links: Sequence[Any]) -> dict[int, Ran]:
    return {i: link._replace(changed=True) if i in recorded.changed else link for i, link in enumerate(links)}


def _entered(setting: Setting, recorded: PassToBatch, index: int) -> Tensor:
    """Return what link ``index`` was given."""
    given = recorded.given[index]
    return setting.state if given is None else given


def _cut(setting: Setting, recorded: PassToBatch, links: Sequence[Any]) -> str | None:
    """Say why the cotangents of ``links`` cannot be one tensor; ``None`` if they can."""
    if recorded.uncut:
        return "the graphs of some blocks lead to those of others"
    like = links[-1].out
    if any(link.out.shape != like.shape or link.out.dtype is not like.dtype for link in links):
        return "states change their shape or dtype from block to block"
    for i, link in enumerate(links):
        if isinstance(link, Link) and link.state is None and (i > 0 or setting.initial):
            return f"the output of {link.path} does not depend on the state before it"
    return None


def _factor(link: Link) -> Any:
    with walking([link], ()):
        return link.residual


def _number(link: Link) -> float:
    factor = _factor(link)
    return 0.0 if isinstance(factor, Tensor) else factor


def _agrees(group: Group, links: Sequence[Link], numbers: Mapping[int, int]) -> bool:
    """Tell whether a batch does what the links' own graphs do: states, what is pulled back, parameters' gradients."""
    batch, outs = group.batch(), group.outputs()
    count = torch.arange(1.0, batch.out.numel() + 1, device=outs.device)
    # Numbers that no symmetry of a block makes vanish; nothing is drawn.
    cotangents = (count * count).sin().reshape(batch.out.shape).to(outs.dtype)
    leaves = {n: p for link in links for n, p in link.parameters.items()}
    states = [link.state for link in links if link.state is not None]
    with without_hooks(list(leaves.values())):
        expected = torch.autograd.grad(
            [link.out for link in links],
            [*states, *leaves.values()],  # type: ignore[arg-type]
            [link.given(c) for link, c in zip(links, cotangents.unbind(0), strict=True)],
            retain_graph=True,
            allow_unused=True,
        )
    total: dict[int, Cotangent] = {}
    weights, pulled = batch.gradients(cotangents, keep=True, of_inputs=True)
    for name, stacked in weights.items():
        for tensor, gradient in zip(group.tensors[name], [] if stacked is None else stacked.unbind(0), strict=False):
            n = numbers[id(tensor)]
            total[n] = plus(total.get(n), gradient)
    rows = [None] * len(links) if pulled is None else list(pulled.unbind(0))
    found = [
        *(row for row, link in zip(rows, links, strict=True) if link.state is not None),
        *(total.get(n) for n in leaves),
    ]
    dtype = group.autocast[1] if group.autocast[2] else outs.dtype
    pairs = zip([batch.out.detach()[group.as_it_was], *found], [outs, *expected], strict=True)
    return total.keys() == leaves.keys() and all(_alike(a, b, dtype) for a, b in pairs)


def _alike(a: Cotangent, b: Cotangent, dtype: torch.dtype) -> bool:
    return a is b if a is None or b is None else bool(all_close(a.to(b.dtype), b, dtype))
