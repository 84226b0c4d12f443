"""Small programs that had wrong gradients once."""

from dataclasses import replace

from random_programs import BETWEEN, ENGINES, Block, Program

BLOCK = Block(("tanh",), "x + g", "state", keeps=False, frozen="no")
PLAIN = Program(
    blocks=(BLOCK, BLOCK),
    more=(),
    alike=False,
    order=None,
    tied=False,
    sides="none",
    between=("nothing",) * 9,
    around="nothing",
    taps=(False,) * 9,
    rest=False,
    kept=False,
    loss="last state",
    end="nothing",
    stem=True,
    input=False,
    backward="backward",
    steps=1,
    training=True,
    engine=0,
    batched=False,
    seed=0,
)


def engine(name):
    """Return the number of the first engine of that name."""
    return next(n for n, (known, _) in enumerate(ENGINES) if known == name)


def behind(step, what):
    """Return ``what`` the model does after a block."""
    assert what in BETWEEN
    return tuple(what if n == step else "nothing" for n in range(9))


def tapped(step):
    """Return the index of the state that the loss uses."""
    return tuple(n == step for n in range(9))


def blocks(*changes):
    """Return a plain block and another one."""
    return (BLOCK, replace(BLOCK, **dict(changes)))


FOUND = {
    "a constant K over a block that cuts the chain": (
        {"blocks": blocks(("operations", ("cut",)), ("form", "g")), "engine": engine("dsf"), "taps": tapped(0)},
        "exact",
    ),
    "a hook that came late, on a state that is gone": (
        {"between": behind(1, "late hook"), "taps": tapped(1)},
        "refused: the output of … has a gradient hook",
    ),
    "a hook on a last state that the loss does not use": (
        {"blocks": (BLOCK,) * 3, "end": "hook", "loss": "no last state", "taps": tapped(1)},
        "exact",
    ),
    "a hook on a last state of which the block has returned a view": (
        {"blocks": blocks(("returns", "view")), "end": "hook", "rest": True},
        "refused: the output of … has a gradient hook",
    ),
    "a view of an older state, changed behind the chain": (
        {"blocks": (replace(BLOCK, form="view of x"),) * 3, "taps": tapped(1), "end": "add_"},
        "torch refuses",
    ),
    "the same, where its block has returned another view of it": (
        {
            "blocks": (replace(BLOCK, returns="view"), *(replace(BLOCK, form="view of x"),) * 2),
            "rest": True,
            "end": "add_",
            "backward": "retained",
        },
        "torch refuses",
    ),
    "a view of the last state, returned beside it, that is changed in place": (
        {"blocks": (BLOCK, BLOCK, replace(BLOCK, returns="view")), "rest": True, "end": "add_", "backward": "retained"},
        "torch refuses",
    ),
    "two backward passes behind a change in place": ({"end": "add_", "backward": "twice"}, "exact"),
    "a mask read under a checkpoint": (
        {"blocks": blocks(("operations", ("where",))), "around": "checkpoint", "engine": engine("highway_bp")},
        "exact",
    ),
    "a norm before a chunk of the state": (
        {"blocks": blocks(("operations", ("norm", "chunk"))), "engine": engine("highway_bp")},
        "exact",
    ),
    "a loss inside that has freed what the residual path is read from": (
        {
            "blocks": (BLOCK, replace(BLOCK, operations=("norm",), keeps=True)),
            "kept": True,
            "engine": engine("highway_bp"),
        },
        "refused: the backward pass inside … to … failed: its graph is freed",
    ),
    "a gradient of nothing, which a reentrant checkpoint makes zeros of": (
        {"blocks": (replace(BLOCK, operations=("reentrant",)), replace(BLOCK, operations=("cut",), form="g"))},
        "refused: … has a checkpoint with use_reentrant=True",
    ),
    "a change in place of a state that retains its gradient": (
        {"between": behind(1, "retain_grad"), "end": "add_", "engine": engine("truncated")},
        "exact",
    ),
}
PROGRAM = {name: replace(PLAIN, **changes) for name, (changes, _) in FOUND.items()}
