"""The models of changing programs, and what changes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, make_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from changing_programs import SETTINGS, Change, Program
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from gradfree import CellLayer

WIDTH, STEPS, WARM_UP = 4, 6, 2
GLOBAL: dict[str, Any] = {}
MODES = {"tanh": torch.tanh, "sin": torch.sin, "relu": torch.relu}


class Slotted:
    __slots__ = tuple(SETTINGS)


class OfClass:
    """Has the settings as attributes of the class."""


class Held(nn.Module):
    """Has the settings as attributes of a module."""


class Owner:
    def read(self, name: str) -> Any:
        return getattr(self, name)


def read_from(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


class Place:
    """Where blocks have their settings.

    Args:
        name: of the place, one of ``PLACES``.

    Attributes:
        held: the attribute of blocks.
        read: returns a setting, from that attribute and its name.
    """

    def __init__(self, name: str):
        usual = {setting: values[0] for setting, values in SETTINGS.items()}
        made: dict[str, Any] = {
            "object": SimpleNamespace(),
            "dataclass": make_dataclass("Settings", list(usual))(*usual.values()),
            "inside an object": SimpleNamespace(),
            "slots": Slotted(),
            "class": OfClass,
            "module": Held(),
            "method": Owner(),
        }
        self._store: Any = GLOBAL if name == "global" else made.get(name, {})
        self._list = list(usual.values()) if name == "list" else None
        for setting, value in usual.items():
            self.set(setting, value)
        store, listed = self._store, self._list
        self.held: Any = {
            "list": listed,
            "inside an object": SimpleNamespace(inner=[SimpleNamespace(settings=store)]),
            "class": None,
            "global": None,
            "method": getattr(store, "read", None),
            "partial": partial(read_from, store),
            "closure": lambda setting: read_from(store, setting),
        }.get(name, store)
        self.read: Callable[[Any, str], Any] = {
            "list": lambda held, setting: held[list(SETTINGS).index(setting)],
            "inside an object": lambda held, setting: read_from(held.inner[0].settings, setting),
            "class": lambda _, setting: getattr(OfClass, setting),
            "global": lambda _, setting: GLOBAL[setting],
            **dict.fromkeys(("method", "partial", "closure"), lambda held, setting: held(setting)),
        }.get(name, read_from)

    def set(self, setting: str, value: Any) -> None:
        """Change a setting."""
        if self._list is not None:
            self._list[list(SETTINGS).index(setting)] = value
        elif isinstance(self._store, dict):
            self._store[setting] = value
        else:
            setattr(self._store, setting, value)


class Adapted(nn.Module):
    """A layer with trainable numbers beside it."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.own = layer, _parameter()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.own


class Gain(nn.Module):
    """A parametrization with trainable numbers."""

    def __init__(self, like: Tensor):
        super().__init__()
        self.gain = nn.Parameter(0.5 + torch.rand_like(like))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.gain


@dataclass
class Behaviour:
    """When blocks do something else, and what.

    Args:
        trigger: one of ``TRIGGERS``.
        act: one of ``ACTS``.
    """

    trigger: str
    act: str

    def __post_init__(self) -> None:
        self.calls = 0

    def acts(self, block: Any, x: Tensor) -> bool:
        """Return whether ``block`` acts in this call; counts it."""
        if self.trigger == "counter":
            block.calls += 1
            return block.calls > WARM_UP
        if self.trigger == "shared counter":
            self.calls += 1
            return self.calls > 3 * WARM_UP
        if self.trigger == "buffer":
            block.seen += 1
            return bool(block.seen > WARM_UP)
        return {
            "never": lambda: False,
            "training": lambda: block.training,
            "data": lambda: bool(x.detach().sum() > 0),
            "grad mode": torch.is_grad_enabled,
            "shape": lambda: len(x) > 3,
        }[self.trigger]()


class Block(nn.Module):
    """A block, or with ``given`` the cell of a layer; reads settings and may change what it does.

    Args:
        place: of its settings.
        behaviour: when it does something else, and what.
    """

    hidden_size = WIDTH

    def __init__(self, place: Place, behaviour: Behaviour):
        super().__init__()
        self.held, self._read, self.behaviour = place.held, place.read, behaviour
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.prompt = 0, None
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """Return the next state."""
        given, x = (0.0, x) if state is None else (x, state)
        acts = self.behaviour.act if self.behaviour.acts(self, x) else ""
        setting = partial(self._read, self.held)
        with torch.set_grad_enabled(torch.is_grad_enabled() and setting("trunk")):
            trunk = 0.3 * self.outer(x) if acts == "no trunk" else self.inner(x)
        g = MODES[setting("mode")](given + (trunk if self.prompt is None else trunk + self.prompt))
        if acts == "same" and state is None:
            return x
        g = self._changed(acts, x, g)
        g = nn.functional.dropout(g, setting("rate"), self.training) if setting("rate") else g
        if setting("keep"):
            self.kept = g
        skip = x.detach() if setting("cut") or acts == "cut" else x
        if acts == "no branch" or not setting("skip"):
            return skip * 0.9 if acts == "no branch" else setting("scale") * g
        return setting("scale") * g + (0.0 if acts == "no skip" else skip)

    def _changed(self, act: str, x: Tensor, g: Tensor) -> Tensor:
        if act == "checkpoint":
            return checkpoint(lambda t: t + self.outer(t), g, use_reentrant=False)
        return {
            "mix": lambda: g + 0.3 * x.mean(0, keepdim=True),
            "roll": lambda: g + 0.3 * x.roll(1, 0),
            "outer": lambda: self.outer(g),
            "in place": lambda: g.mul(1.0).add_(0.2 * x),
            "noise": lambda: g * torch.rand_like(g),
            "view": lambda: g.reshape(-1, 2).sin().reshape(g.shape),
            "norm": lambda: (g - g.mean(0)) * 0.7,
            "float": lambda: g.float().double(),
        }.get(act, lambda: g)()


class Network(nn.Module):
    """The model of a program: a stem, what the engine is attached to, and a head."""

    def __init__(self, program: Program):
        super().__init__()
        torch.manual_seed(program.seed)
        self.program, self.place = program, Place(program.place)
        self._behaviour, self._quiet = Behaviour(program.trigger, program.act), Behaviour("never", "")
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.factor = nn.Parameter(torch.ones(()))
        self.body = self._body()
        self._freeze()

    def block(self, n: int = 0) -> Block:
        """Return the next block; not all act if the program says so."""
        return Block(self.place, self._behaviour if self.program.all or n == 1 else self._quiet)

    def _body(self) -> nn.Module:
        p, timed = self.program, {"gru": nn.GRU, "lstm": nn.LSTM}
        if p.model in timed:
            return timed[p.model](WIDTH, WIDTH, min(p.length, 2), bidirectional=p.length > 3)
        if p.model == "torch's cell":
            return CellLayer(nn.GRUCell(WIDTH, WIDTH))
        if p.model == "cell":
            return CellLayer(self.block(1))
        if p.model == "layers":
            return nn.Sequential(*[m for _ in range(p.length) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        blocks = [self.block(n) for n in range(p.length)]
        return nn.ModuleList(blocks) if p.model == "list" else nn.Sequential(*blocks)

    def _freeze(self) -> None:
        what = self.program.frozen
        frozen = [self.body] if "body" in what else [self] if what == "all" else []
        frozen += [self.stem] if "stem" in what else []
        frozen += [self.layers[1 % len(self.layers)]] if what == "a block" else []
        for module in frozen:
            module.requires_grad_(False)

    @property
    def timed(self) -> bool:
        """Whether the chain is in time."""
        return self.program.model in ("gru", "lstm", "cell", "torch's cell")

    @property
    def layers(self) -> list[nn.Module]:
        """The blocks of the body, its cell, or the layers themselves."""
        if isinstance(self.body, CellLayer):
            return [self.body.cell]
        if isinstance(self.body, nn.RNNBase):
            return [self.body]
        return [m for m in self.body if not isinstance(m, nn.Tanh)]  # type: ignore[attr-defined]

    def input(self, step: int) -> Tensor:
        """Return the batch of a pass."""
        size = self.program.sizes[step % len(self.program.sizes)]
        shape = (STEPS, size, WIDTH) if self.timed else (size, WIDTH)
        return torch.randn(shape).requires_grad_(self.program.input)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        first = self.stem(x)
        state: Any = first
        if self.program.model == "list":
            for block in self.body:  # type: ignore[attr-defined]
                state = block(state)
        elif self.program.model == "stages":
            state = self.body[1:](self.body[:1](state))  # type: ignore[index]
        else:
            state = self.body(state)
        out = state[0] if self.timed else state
        out = out[..., :WIDTH] + out[..., WIDTH:].sum() if out.shape[-1] > WIDTH else out
        total = self.head(out * self.factor).square().mean()
        total = total + first.sin().mean() if self.program.taps else total
        return total + sum(self._kept()) if self.program.kept and not self.timed else total

    def _kept(self) -> Iterator[Tensor]:
        for block in self.layers:
            kept, block.kept = getattr(block, "kept", None), None  # type: ignore[assignment]
            if kept is not None:
                yield kept.square().mean()

    def apply_change(self, change: Change) -> None:
        """Make the change."""
        if not isinstance(change.what, str):
            self.place.set(*change.what)
        elif change.what in ("train", "eval"):
            self.train(change.what == "train")
        elif change.what in _AROUND:
            _AROUND[change.what](self)
        else:
            count = len(self.layers)
            for n in reversed(range(count)) if change.block is None else [change.block % count]:
                self._change_layer(change.what, n)

    def _change_layer(self, what: str, n: int) -> None:
        layer, other = self.layers[n], self.layers[n - 1]
        linear, name = _weight_of(layer)
        adapted: Any = layer if isinstance(layer, Block) else None
        blocks: Any = self.body if self.program.model in ("sequential", "list", "stages") else None
        if what.startswith(("freeze", "unfreeze")):
            module = layer if what.endswith("a block") else getattr(linear, name)
            module.requires_grad_(what.startswith("un"))
        elif what == "a parametrization":
            parametrize.register_parametrization(linear, name, Gain(getattr(linear, name)))
        elif what == "another weight" and not parametrize.is_parametrized(linear):
            setattr(linear, name, nn.Parameter(torch.randn_like(getattr(linear, name))))
        elif what == "other numbers" and not parametrize.is_parametrized(linear):
            getattr(linear, name).data = torch.randn_like(getattr(linear, name))
        elif what == "a computed weight" and name in linear._parameters:
            before = linear._parameters.pop(name)
            setattr(linear, name, before.detach() * self.factor)
        elif what == "a tied weight" and not parametrize.is_parametrized(linear):
            mine, theirs = getattr(linear, name), _weight_of(other)
            tied = getattr(*theirs)
            if isinstance(tied, nn.Parameter) and mine.shape == tied.shape:
                setattr(linear, name, tied)
        elif adapted is not None:
            self._change_block(what, adapted, n, blocks)

    def _change_block(self, what: str, block: Block, n: int, blocks: Any) -> None:
        if what == "an adapter":
            block.inner = Adapted(block.inner)  # type: ignore[assignment]
        elif what == "a hook with an adapter":
            block.adapter = _parameter()
            block.inner.register_forward_hook(lambda _, args, out: out + args[0] @ block.adapter)
        elif what == "a hook on a block":
            block.adapter = _parameter()
            block.register_forward_hook(lambda _, args, out: out + 0.1 * args[-1] @ block.adapter)
        elif what == "another forward":
            block.adapter, before = _parameter(), block.forward
            block.forward = lambda *args: before(*args) + 0.1 * args[-1] @ block.adapter  # type: ignore[method-assign]
        elif what == "a prompt":
            block.prompt = nn.Parameter(torch.randn(WIDTH))  # type: ignore[assignment]
        elif what == "another layer":
            block.inner = nn.Linear(WIDTH, WIDTH)
        elif what == "no bias" and isinstance(block.inner, nn.Linear):
            block.inner.bias = None  # type: ignore[assignment]
        elif what == "a trained buffer":
            block.inner.weight = None  # type: ignore[assignment]
            block.inner = Prompted()  # type: ignore[assignment]
        elif what == "another block" and blocks is not None:
            blocks[n] = self.block(n)
        elif what == "one block more" and blocks is not None:
            blocks.append(self.block(n))
        elif what == "one block less" and blocks is not None and len(blocks) > 1:
            del blocks[n]


class Prompted(nn.Module):
    """Has a buffer that needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(WIDTH, WIDTH).requires_grad_())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table


_AROUND: dict[str, Callable[[Network], Any]] = {
    f"{what} the {part}": lambda network, part=part, trained=trained: getattr(network, part).requires_grad_(trained)
    for part in ("stem", "head")
    for what, trained in (("freeze", False), ("unfreeze", True))
}


def _weight_of(layer: Any) -> tuple[Any, str]:
    """Return the module that has the layer's first weight, and its name there."""
    if isinstance(layer, nn.RNNBase):
        return layer, "weight_hh_l0"
    if isinstance(layer, nn.GRUCell):
        return layer, "weight_hh"
    if isinstance(layer, nn.Linear):
        return layer, "weight"
    inner = layer.inner
    while isinstance(inner, Adapted):
        inner = inner.layer
    return (inner, "table") if isinstance(inner, Prompted) else (inner, "weight")


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH))
