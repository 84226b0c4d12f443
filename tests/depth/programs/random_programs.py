"""Random models, passes and engines as data, which hypothesis draws, prints if a test fails, and shrinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

OPERATIONS = (
    *("tanh", "linear", "norm", "relu", "relu_", "square", "custom view", "halving", "reshape", "transpose", "chunk"),
    *("float", "dropout", "detached part", "no_grad part", "cut", "add_", "side", "normed weight"),
    *("outside", "input of the model", "older state"),
    *("checkpoint", "reentrant", "where", "cumsum", "hooked", "hook", "index", "unsqueezed", "saved constant"),
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
RETURNS = (
    *("state", "tuple", "list", "dictionary", "twin", "view", "none", "input", "dataclass", "side", "named tuple"),
    *("model output", "second"),
)
BETWEEN = (
    *("scale", "doubling hook", "hook", "late hook", "retain_grad", "branch", "view", "change of a copy", "noise"),
    *("change in place", "detach", "transpose twice", "no_grad block", "single", "chunk", "another pass"),
    "sum",
)
SIDES = (
    *("none", "shared", "of the first state", "own", "older state", "state", "mixed", "shared, detached"),
    "returned by the first block",
)
BACKWARDS = (
    "backward",
    "retained",
    "twice",
    "freed",
    "grad of parameters",
    "grad of all",
    "two passes, one loss",
    "two losses",
    "taps first",
    "taps of a freed graph",
    "grad of the stem",
    "grad of states",
    "grad of states and parameters",
    "grad of states, then backward",
    "a block frozen before",
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

    operations: tuple[str, ...] = ("tanh",)
    form: str = "x + g"
    returns: str = "state"
    keeps: str = "nothing"
    frozen: str = "no"


@dataclass(frozen=True)
class Program:
    """A model, what a pass of it does, how gradients are requested, and the engine on it.

    Attributes:
        blocks: of the first chain.
        more: of a second chain after it.
        alike: whether all blocks of a chain equal its first.
        whole: whether the first chain is an ``nn.Sequential`` of equal blocks that the model calls as a whole.
        order: the blocks that run, or ``None`` for all.
        tied: whether two blocks share a weight.
        sides: the inputs of blocks beside the state.
        between: what the model does after each block.
        around: the checkpoint around every block.
        keywords: whether blocks get their inputs as keyword arguments.
        taps: the states that the loss uses; the last is that before the chain.
        rest: whether the loss uses the blocks' extra outputs.
        kept: whether the loss uses tensors that blocks store.
        loss: whether the loss uses the last state.
        end: what is done with the last state.
        stem: what there is before the chain.
        input: whether the model's input needs a gradient.
        backward: how gradients are requested.
        steps: the number of passes.
        training: the mode.
        engine: its index in ``ENGINES``.
        batched: the option of ``attach``.
        seed: of weights, inputs and masks.
    """

    blocks: tuple[Block, ...] = (Block(), Block())
    more: tuple[Block, ...] = ()
    alike: bool = False
    whole: bool = False
    order: tuple[int, ...] | None = None
    tied: bool = False
    sides: str = "none"
    between: tuple[str, ...] = ("nothing",) * 9
    around: str = "nothing"
    keywords: bool = False
    taps: tuple[bool, ...] = (False,) * 9
    rest: bool = False
    kept: bool = False
    loss: str = "last state"
    end: str = "nothing"
    stem: str = "a layer"
    input: bool = False
    backward: str = "backward"
    steps: int = 1
    training: bool = True
    engine: int = 0
    batched: bool | str = False
    seed: int = 0


def mostly(usual: Any, *others: Any, odds: int) -> st.SearchStrategy[Any]:
    """Draw ``usual`` in ``odds`` of ``odds`` + 1 cases, or one of the others."""
    return st.integers(0, odds).flatmap(lambda n: st.sampled_from(others) if n == odds else st.just(usual))


BLOCKS = st.builds(
    Block,
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=3).map(tuple),
    form=mostly("x + g", *FORMS[1:], odds=2),
    returns=mostly("state", *RETURNS[1:], odds=2),
    keeps=mostly("nothing", "branch", "input", "state", odds=7),
    frozen=mostly("no", "a layer", "all", odds=12),
)
PROGRAMS = st.builds(
    Program,
    blocks=st.lists(BLOCKS, min_size=2, max_size=5).map(tuple),
    more=st.one_of(*[st.just(())] * 3, st.tuples(BLOCKS, BLOCKS)),
    alike=st.booleans(),
    whole=mostly(False, True, odds=3),
    order=st.one_of(*[st.none()] * 5, st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple)),
    tied=mostly(False, True, odds=4),
    sides=mostly("none", *SIDES[1:], odds=2),
    between=st.lists(mostly("nothing", *BETWEEN, odds=9), min_size=9, max_size=9).map(tuple),
    around=mostly("nothing", "checkpoint", "reentrant", odds=4),
    keywords=mostly(False, True, odds=4),
    taps=st.lists(mostly(False, True, odds=3), min_size=9, max_size=9).map(tuple),
    rest=st.booleans(),
    kept=st.booleans(),
    loss=mostly("last state", "no last state", odds=9),
    end=mostly("nothing", "add_", "relu_", "hook", "states change", odds=3),
    stem=mostly("a layer", "nothing", "a block's weight", odds=4),
    input=st.booleans(),
    backward=mostly("backward", *BACKWARDS[1:], odds=1),
    steps=st.integers(1, 2),
    training=mostly(True, False, odds=5),
    engine=st.integers(0, len(ENGINES) - 1),
    batched=st.sampled_from(["auto", False, False, True]),
    seed=st.integers(0, 999),
)
