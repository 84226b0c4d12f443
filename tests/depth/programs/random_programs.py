"""Random models, passes and engines as data, which hypothesis draws, prints if a test fails, and shrinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

OPERATIONS = (
    *("tanh", "linear", "norm", "relu", "relu_", "square", "custom view", "halving", "reshape", "transpose", "chunk"),
    *("float", "dropout", "detached part", "no_grad part", "cut", "add_", "side", "outside", "normed weight"),
    *("checkpoint", "reentrant", "where", "cumsum", "hooked", "index", "unsqueezed", "saved constant"),
)
FORMS = (
    "x + g",
    "g",
    "relu(x + g)",
    "norm(x + g)",
    "0.5 x + g",
    "gate",
    "lerp",
    "x",
    "x += g",
    "relu_(x)",
    "view of x",
)
RETURNS = ("state", "tuple", "list", "dictionary", "twin", "view", "none", "input", "dataclass")
BETWEEN = (
    *("scale", "doubling hook", "hook", "late hook", "retain_grad", "branch", "view", "change of a copy", "noise"),
    *("change in place", "detach", "transpose twice", "no_grad block", "single", "chunk"),
)
SIDES = ("none", "shared", "of the first state", "own", "older state", "state", "mixed", "shared, detached")
BACKWARDS = (
    "backward",
    "retained",
    "twice",
    "freed",
    "grad of parameters",
    "grad of all",
    "two passes, one loss",
    "two losses",
)
ENGINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("backprop", {"plain": False}),
    ("highway_bp", {"iterations": 99}),
    ("highway_bp", {"iterations": 3, "segments": 2}),
    ("highway_bp", {"iterations": 9, "segments": 3}),
    ("fixed_point", {"iterations": 99}),
    ("fixed_point", {"iterations": 9, "segments": 2}),
    ("dsf", {"feedback": 0.7, "iterations": 99}),
    ("truncated", {"window": 99}),
    ("deeppcr", {}),
)


@dataclass(frozen=True)
class Block:
    """One block: operations on the state compute g, and the form combines the state with g."""

    operations: tuple[str, ...]
    form: str
    returns: str
    keeps: bool
    frozen: str


@dataclass(frozen=True)
class Program:
    """A model, what a pass of it does, how gradients are requested, and the engine on it.

    Attributes:
        blocks: of the first chain.
        more: of a second chain after it.
        alike: whether all blocks of a chain equal its first.
        order: the blocks that run, or ``None`` for all.
        tied: whether two blocks share a weight.
        sides: the inputs of blocks beside the state.
        between: what the model does after each block.
        around: the checkpoint around every block.
        taps: the states that the loss uses.
        rest: whether the loss uses the blocks' extra outputs.
        kept: whether the loss uses tensors that blocks store.
        loss: whether the loss uses the last state.
        end: what is done with the last state.
        stem: whether there is a layer with parameters before the chain.
        input: whether the model's input needs a gradient.
        backward: how gradients are requested.
        steps: the number of passes.
        training: the mode.
        engine: its index in ``ENGINES``.
        batched: the option of ``attach``.
        seed: of weights, inputs and masks.
    """

    blocks: tuple[Block, ...]
    more: tuple[Block, ...]
    alike: bool
    order: tuple[int, ...] | None
    tied: bool
    sides: str
    between: tuple[str, ...]
    around: str
    taps: tuple[bool, ...]
    rest: bool
    kept: bool
    loss: str
    end: str
    stem: bool
    input: bool
    backward: str
    steps: int
    training: bool
    engine: int
    batched: bool | str
    seed: int


def mostly(usual: Any, *others: Any, odds: int) -> st.SearchStrategy[Any]:
    """Draw ``usual`` in ``odds`` of ``odds`` + 1 cases, or one of the others."""
    return st.integers(0, odds).flatmap(lambda n: st.sampled_from(others) if n == odds else st.just(usual))


BLOCKS = st.builds(
    Block,
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=3).map(tuple),
    form=mostly("x + g", *FORMS[1:], odds=2),
    returns=mostly("state", *RETURNS[1:], odds=2),
    keeps=mostly(False, True, odds=7),
    frozen=mostly("no", "a layer", "all", odds=12),
)
PROGRAMS = st.builds(
    Program,
    blocks=st.lists(BLOCKS, min_size=2, max_size=5).map(tuple),
    more=st.one_of(*[st.just(())] * 3, st.tuples(BLOCKS, BLOCKS)),
    alike=st.booleans(),
    order=st.one_of(*[st.none()] * 5, st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple)),
    tied=mostly(False, True, odds=4),
    sides=mostly("none", *SIDES[1:], odds=2),
    between=st.lists(mostly("nothing", *BETWEEN, odds=9), min_size=9, max_size=9).map(tuple),
    around=mostly("nothing", "checkpoint", "reentrant", odds=4),
    taps=st.lists(mostly(False, True, odds=3), min_size=9, max_size=9).map(tuple),
    rest=st.booleans(),
    kept=st.booleans(),
    loss=mostly("last state", "no last state", odds=9),
    end=mostly("nothing", "add_", "relu_", "hook", odds=3),
    stem=mostly(True, False, odds=4),
    input=st.booleans(),
    backward=mostly("backward", *BACKWARDS[1:], odds=1),
    steps=st.integers(1, 2),
    training=mostly(True, False, odds=5),
    engine=st.integers(0, len(ENGINES) - 1),
    batched=st.sampled_from(["auto", False, False, True]),
    seed=st.integers(0, 999),
)
