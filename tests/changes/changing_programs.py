"""Models that change while an engine is attached, as data, which hypothesis draws, prints if a test fails, and shrinks.

There are three kinds: parameters that enter later (``LATE``), settings that blocks share (``SETTINGS``), and blocks
that change what they do from pass to pass (``ACTS``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

DEPTH: dict[str, tuple[str, dict[str, Any]]] = {
    "backprop": ("backprop", {"plain": False}),
    "highway_bp": ("highway_bp", {"iterations": 99}),
    "highway_bp, segments": ("highway_bp", {"iterations": 9, "segments": 2}),
    "fixed_point": ("fixed_point", {"iterations": 99}),
    "truncated": ("truncated", {"window": 99}),
    "dsf": ("dsf", {"feedback": 0.7, "iterations": 99}),
    "deeppcr": ("deeppcr", {}),
    "auto": ("auto", {}),
}
TIME: dict[str, tuple[str, dict[str, Any]]] = {
    "backprop": ("backprop", {"plain": False}),
    "deeppcr": ("deeppcr", {}),
    "fixed_point": ("fixed_point", {"iterations": 40}),
    "shooting": ("shooting", {"segments": 3, "tolerance": 1e-12}),
    "newton": ("newton", {"jacobian": "diagonal", "tolerance": 1e-12, "max_sweeps": 99}),
    "auto": ("auto", {}),
}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "orthogonal_backprop": ("orthogonal_backprop", {"temperature": 1.0, "orthogonalize_every": 999}),
}
ENGINES = {
    **dict.fromkeys(("sequential", "list", "stages"), DEPTH),
    **dict.fromkeys(("gru", "lstm", "cell", "torch's cell"), TIME),
    "layers": LAYERS,
}
"""The exact engines by the kind of model."""

LATE = (
    *("an adapter", "a hook with an adapter", "a hook on a block", "another forward", "a prompt"),
    *("a parametrization", "another layer", "another weight", "other numbers", "a computed weight", "no bias"),
    *("a tied weight", "another block", "one block more", "one block less", "a trained buffer"),
    *("unfreeze a weight", "unfreeze a block", "freeze a weight", "freeze a block"),
    *("unfreeze the stem", "freeze the stem", "unfreeze the head", "freeze the head"),
)
SETTINGS = {
    "trunk": (True, False),
    "cut": (False, True),
    "scale": (1.0, 0.5),
    "mode": ("tanh", "sin", "relu"),
    "skip": (True, False),
    "rate": (0.0, 0.5),
    "keep": (False, True),
}
"""What blocks read in their forward, with the usual value first."""

PLACES = (
    *("object", "list", "dictionary", "dataclass", "inside an object", "slots", "class", "global", "module", "method"),
    *("partial", "closure"),
)
"""Where blocks have their settings."""

TRIGGERS = ("never", "counter", "buffer", "shared counter", "training", "data", "grad mode", "shape")
ACTS = (
    *("mix", "roll", "cut", "no trunk", "outer", "no branch", "no skip", "in place", "same", "noise", "checkpoint"),
    *("view", "norm", "float"),
)
MODES = ("train", "eval")


@dataclass(frozen=True)
class Change:
    """What changes: one of ``LATE``, a setting with its new value, or a mode.

    Attributes:
        what: the change.
        block: the index of the block, modulo their number; ``None`` for all.
        step: the pass before which it happens.
        between: whether it happens behind that pass's forward instead.
    """

    what: str | tuple[str, Any]
    block: int | None
    step: int
    between: bool = False


@dataclass(frozen=True)
class Program:
    """A model, what changes in it, and the engine on it.

    Attributes:
        model: its kind, one of ``ENGINES``.
        engine: its index among those of the model, modulo their number.
        length: the number of blocks.
        frozen: what is not trained at first.
        head: whether the head is in the model that the engine is attached to.
        place: where blocks have their settings.
        trigger: when blocks do ``act``.
        act: what they do then.
        all: whether all blocks do.
        changes: in their order.
        steps: the number of passes.
        repeated: how often each pass is run.
        evaluated: whether the model is evaluated between two passes.
        sizes: the number of samples of each pass.
        input: whether the model's input needs a gradient.
        taps: whether the loss uses the state behind the stem.
        kept: whether the loss uses what blocks have kept.
        backward: how gradients are requested.
        batched: the option of ``attach``.
        seed: of weights and inputs.
    """

    model: str = "sequential"
    engine: int = 0
    length: int = 3
    frozen: str = "nothing"
    head: bool = False
    place: str = "object"
    trigger: str = "never"
    act: str = "mix"
    all: bool = True
    changes: tuple[Change, ...] = ()
    steps: int = 3
    repeated: int = 1
    evaluated: bool = False
    sizes: tuple[int, ...] = (3, 3, 3, 3)
    input: bool = False
    taps: bool = False
    kept: bool = False
    backward: str = "backward"
    batched: bool | str = "auto"
    seed: int = 0

    @property
    def on(self) -> tuple[str, dict[str, Any]]:
        """The name and the options of the engine."""
        engines = list(ENGINES[self.model].values())
        return engines[self.engine % len(engines)]


def programs(
    models: tuple[str, ...], changes: st.SearchStrategy[Any], triggers: tuple[str, ...]
) -> st.SearchStrategy[Program]:
    """Return programs of these models, with changes of this kind and with blocks that act at these times."""
    change = st.builds(
        Change,
        what=changes,
        block=st.sampled_from([None, None, 0, 1, 2]),
        step=st.integers(1, 2),
        between=st.sampled_from([False, False, False, True]),
    )
    return st.builds(
        Program,
        model=st.sampled_from(models),
        engine=st.integers(0, 839),
        length=st.integers(2, 7),
        frozen=st.sampled_from(["nothing", "nothing", "body", "body", "all", "a block", "stem", "body and stem"]),
        head=st.booleans(),
        place=st.sampled_from(PLACES),
        trigger=st.sampled_from(triggers),
        act=st.sampled_from(ACTS),
        all=st.sampled_from([True, True, True, False]),
        changes=st.lists(change, min_size=1, max_size=3).map(tuple),
        steps=st.integers(2, 4),
        repeated=st.sampled_from([1, 1, 1, 2, 10]),
        evaluated=st.booleans(),
        sizes=st.lists(st.sampled_from([3, 3, 3, 1, 5]), min_size=4, max_size=4).map(tuple),
        input=st.booleans(),
        taps=st.booleans(),
        kept=st.booleans(),
        backward=st.sampled_from(["backward", "backward", "accumulated", "grad of all", "twice"]),
        batched=st.sampled_from(["auto", "auto", False, True]),
        seed=st.integers(0, 999),
    )


_SETTING = st.sampled_from([(name, value) for name, values in SETTINGS.items() for value in values])
_BLOCKS = (*("sequential",) * 4, "list", "stages", "cell")
KINDS = {
    "parameters that enter later": programs((*ENGINES, *("sequential",) * 4), st.sampled_from(LATE), ("never",)),
    "settings that blocks share": programs(_BLOCKS, st.one_of(_SETTING, _SETTING, st.sampled_from(LATE)), ("never",)),
    "blocks that change": programs(_BLOCKS, st.one_of(st.sampled_from(MODES), _SETTING), TRIGGERS[1:]),
}
