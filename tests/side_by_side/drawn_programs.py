"""Programs as data, each drawn from its number alone: the same in every version of the package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "depth" / "programs"))

from random_programs import BACKWARDS, BETWEEN, FORMS, OPERATIONS, RETURNS, SIDES, Block, Program

ASKED = (
    *("tap first", "tap last", "freed tap", "tap alone", "thrice", "two losses of one pass"),
    *("gradient of a state", "gradient of a state, then backward", "gradient of the last state"),
)
"""Ways to ask for gradients beside those of ``random_programs``."""
AROUND = (
    *("weight before", "weight behind", "penalty", "first state", "evaluation before", "evaluation behind"),
    *("pass let go of", "frozen behind", "closure of a state"),
)
"""What else a model may do with what belongs to its chains."""
EXACT = (
    ("backprop", {"plain": False}),
    ("highway_bp", {"iterations": 99}),
    ("highway_bp", {"iterations": 99, "gamma": 0.3}),
    ("highway_bp", {"iterations": 3, "segments": 2}),
    ("highway_bp", {"iterations": 9, "segments": 3}),
    ("fixed_point", {"iterations": 99}),
    ("fixed_point", {"iterations": 9, "segments": 2}),
    ("dsf", {"feedback": 0.7, "iterations": 99}),
    ("truncated", {"window": 99}),
    ("deeppcr", {}),
)
INEXACT = (
    ("highway_bp", {"iterations": 0}),
    ("highway_bp", {"iterations": 1}),
    ("highway_bp", {"iterations": 1, "gamma": 0.3}),
    ("highway_bp", {"iterations": 0, "segments": 2}),
    ("highway_bp", {"tolerance": 1e-3}),
    ("fixed_point", {"iterations": 1}),
    ("truncated", {"window": 2}),
    ("dsf", {"feedback": 0.7}),
    ("dsf", {"feedback": 0.5, "iterations": 1}),
)
LAYERED = (
    ("fa", {"seed": 3}),
    ("dfa", {"seed": 4}),
    ("pepita", {"seed": 5}),
    ("foton", {}),
    ("foton", {"streaming": True}),
    ("foton", {"temperature": 1.0, "refresh_feedback_every": 2}),
    ("orthogonal_backprop", {}),
)
STACKED = (
    *("linear", "pre-norm", "post-norm", "convolution", "batch norm", "dropout", "relu in place", "attention", "gated"),
    *("two layers", "plain layer", "scaled"),
)
CHANGED = (
    *("nothing", "frozen", "half frozen", "another epsilon", "a hook", "a hook inside", "shared", "a weight shared"),
    *("another mode", "another class", "no bias"),
)
"""How one block of a stack differs from the others."""


@dataclass(frozen=True)
class Stack:
    """Blocks of one kind.

    Attributes:
        kind: one of ``STACKED``.
        length: how many.
        container: how the model runs them.
        changed: what one of them has that the others have not.
        taps: whether states are in the loss themselves.
        training: the mode.
        input: whether the model's input needs a gradient.
        stem: whether a layer with parameters lies before them.
        steps: how many passes there are.
        frozen_first: how many blocks at the beginning are frozen.
        seed: of weights, inputs and masks.
    """

    kind: str
    length: int
    container: str
    changed: str
    taps: bool
    training: bool
    input: bool
    stem: bool
    steps: int
    frozen_first: int
    seed: int


@dataclass(frozen=True)
class Layers:
    """Layers and activations, for engines that take these apart.

    Attributes:
        widths: of the states.
        activation: between them.
        convolution: whether the first layers are convolutions.
        norm: whether there are norms.
        tap: whether the loss has a state inside, too.
        input: whether the model's input needs a gradient.
        steps: how many training steps there are.
        seed: of weights and inputs.
    """

    widths: tuple[int, ...]
    activation: str
    convolution: bool
    norm: bool
    tap: bool
    input: bool
    steps: int
    seed: int


@dataclass(frozen=True)
class Drawn:
    """One program.

    Attributes:
        number: what it is drawn from.
        model: the model and its passes.
        engine: its name.
        options: of the engine.
        batched: the option of ``attach``.
        residual: the option of ``attach``.
        asked: how gradients are asked for.
        around: what else the model does.
        exact: whether theory says that gradients are autograd's.
    """

    number: int
    model: Program | Stack | Layers
    engine: str
    options: dict[str, Any]
    batched: bool | str
    residual: float | None
    asked: str
    around: str
    exact: bool


class Draw:
    """Choices from a seed."""

    def __init__(self, seed: int):
        self._random = Random(seed)

    def one_of(self, *options: Any) -> Any:
        """Return one of ``options``."""
        return self._random.choice(options)

    def mostly(self, usual: Any, others: Sequence[Any], odds: int) -> Any:
        """Return ``usual`` in ``odds`` of ``odds`` + 1 cases, or one of the others."""
        return self.one_of(*others) if self._random.randrange(odds + 1) == odds else usual

    def chance(self, odds: int) -> bool:
        """Return ``True`` in one of ``odds`` + 1 cases."""
        return self._random.randrange(odds + 1) == odds

    def between(self, least: int, most: int) -> int:
        """Return a number."""
        return self._random.randint(least, most)


def drawn(number: int) -> Drawn:
    """Return the program of that number."""
    draw = Draw(number)
    family = draw.one_of("program", "program", "program", "stack", "stack", "layers")
    engine, options = draw.one_of(*(LAYERED if family == "layers" else EXACT))
    exact = family != "layers"
    if exact and draw.chance(3):
        (engine, options), exact = draw.one_of(*INEXACT), False
    batched = draw.one_of("auto", "auto", False, True) if engine in ("highway_bp", "fixed_point", "dsf") else "auto"
    residual = 0.9 if engine == "highway_bp" and draw.chance(9) else None
    model = {"program": _program, "stack": _stack, "layers": _layers}[family](draw)
    asked = draw.mostly("backward", (*BACKWARDS[1:], *ASKED), 1)
    around = draw.mostly("nothing", AROUND, 4)
    return Drawn(number, model, engine, options, batched, residual, asked, around, exact)


def _block(draw: Draw) -> Block:
    return Block(
        operations=tuple(draw.one_of(*OPERATIONS) for _ in range(draw.between(1, 3))),
        form=draw.mostly("x + g", FORMS[1:], 2),
        returns=draw.mostly("state", RETURNS[1:], 3),
        keeps=draw.chance(9),
        frozen=draw.mostly("no", ("a layer", "all"), 9),
    )


def _program(draw: Draw) -> Program:
    blocks = tuple(_block(draw) for _ in range(draw.between(2, 5)))
    twice = tuple(range(min(len(blocks), 4))) * 2
    order = tuple(draw.between(0, 4) for _ in range(draw.between(1, 5)))
    return Program(
        blocks=blocks,
        more=(_block(draw), _block(draw)) if draw.chance(4) and len(blocks) < 4 else (),
        alike=draw.chance(1),
        # With a second chain there is no room for all states twice.
        order=draw.mostly(None, (order, twice[:7]), 4),
        tied=draw.chance(4),
        sides=draw.mostly("none", SIDES[1:], 3),
        between=tuple(draw.mostly("nothing", BETWEEN, 11) for _ in range(9)),
        around=draw.mostly("nothing", ("checkpoint", "reentrant"), 6),
        taps=tuple(draw.chance(3) for _ in range(9)),
        rest=draw.chance(1),
        kept=draw.chance(1),
        loss=draw.mostly("last state", ("no last state",), 9),
        end=draw.mostly("nothing", ("add_", "relu_", "hook"), 5),
        stem=draw.mostly(True, (False,), 4),
        input=draw.chance(1),
        backward="backward",
        steps=draw.between(1, 2),
        training=draw.mostly(True, (False,), 5),
        engine=0,
        batched="auto",
        seed=draw.between(0, 999),
    )


def _stack(draw: Draw) -> Stack:
    return Stack(
        kind=draw.one_of(*STACKED),
        length=draw.between(2, 7),
        container=draw.one_of("Sequential", "Sequential", "loop", "loop over a Sequential", "nested", "inside"),
        changed=draw.mostly("nothing", CHANGED[1:], 1),
        taps=draw.chance(2),
        training=draw.mostly(True, (False,), 2),
        input=draw.chance(1),
        stem=draw.mostly(True, (False,), 2),
        steps=draw.between(1, 3),
        frozen_first=draw.mostly(0, (1, 2), 7),
        seed=draw.between(0, 999),
    )


def _layers(draw: Draw) -> Layers:
    return Layers(
        widths=tuple(draw.between(3, 6) for _ in range(draw.between(2, 5))),
        activation=draw.one_of("Tanh", "ReLU", "GELU", "Identity", "Sigmoid", "LeakyReLU"),
        convolution=draw.chance(4),
        norm=draw.chance(6),
        tap=draw.chance(6),
        input=draw.chance(1),
        steps=draw.between(1, 3),
        seed=draw.between(0, 999),
    )
