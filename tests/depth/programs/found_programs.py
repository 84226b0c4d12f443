"""Small programs that had wrong gradients once, and others that a recorder of blocks may get wrong."""

from dataclasses import replace

from random_programs import BETWEEN, ENGINES, Block, Program

BLOCK = Block()


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
            "blocks": (BLOCK, replace(BLOCK, operations=("norm",), keeps="branch")),
            "kept": True,
            "engine": engine("highway_bp"),
        },
        "refused: the backward pass inside … to … failed: its graph is freed",
    ),
    "a gradient of nothing, which a reentrant checkpoint makes zeros of": (
        {"blocks": (replace(BLOCK, operations=("reentrant",)), replace(BLOCK, operations=("cut",), form="g"))},
        "refused: … has a checkpoint with use_reentrant=True",
    ),
    "blocks without a residual path": (
        {"blocks": (replace(BLOCK, form="g"),) * 2, "engine": engine("highway_bp")},
        "refused: no residual path from '…' to '…'",
    ),
    "a change in place of a state that retains its gradient": (
        {"between": behind(1, "retain_grad"), "end": "add_", "engine": engine("truncated")},
        "exact",
    ),
}
"""Programs that had wrong gradients once, with their outcomes."""

LINEAR, SIDE = replace(BLOCK, operations=("linear",)), replace(BLOCK, operations=("side",))
PAIR = replace(BLOCK, returns="tuple")
ROW = {"blocks": (LINEAR,) * 3, "whole": True, "batched": True}
UNUSUAL = {
    "a loss on every state": ({"taps": (True,) * 9}, "exact"),
    "inputs returned, and a part": ({"blocks": (replace(BLOCK, form="x", returns="view"),) * 3, "rest": True}, "exact"),
    "a repeated block": ({"order": (0, 1, 1, 0)}, "exact"),
    "blocks in checkpoints": ({"around": "checkpoint"}, "exact"),
    "blocks in reentrant checkpoints": ({"around": "reentrant"}, "exact; its input is computed by the model"),
    "an operation between blocks": ({"between": behind(0, "scale")}, "exact; its input is computed by the model"),
    "a branch": ({"between": behind(0, "branch")}, "exact; another block has used the output of the block before it"),
    "a state that retains its gradient": (
        {"between": behind(0, "retain_grad")},
        "exact; the state before it has a gradient hook or retain_grad()",
    ),
    "an input that first appears after the first block": (
        {"blocks": (BLOCK, SIDE), "sides": "mixed"},
        "exact; it gets a tensor of shape (4,) that needs a gradient and that the first block of the chain did not get",
    ),
    "a bias that the first block computes for all": (
        {
            "blocks": (PAIR, *[replace(SIDE, returns="side")] * 2),
            "sides": "returned by the first block",
            "rest": True,
        },
        "exact; it gets a tensor",
    ),
    "older states in another chain": ({"more": (SIDE, SIDE), "sides": "older state"}, "exact; it gets a tensor"),
    "a weight used before the chain": ({"blocks": (LINEAR, LINEAR), "stem": "a block's weight"}, "exact"),
    "another pass in turns": ({"between": behind(0, "another pass")}, "exact"),
    "the taps' backward first": ({"taps": tapped(0), "backward": "taps first"}, "exact"),
    "a block frozen after the pass": ({"blocks": (LINEAR, LINEAR), "backward": "a block frozen before"}, "exact"),
    "a block of a row frozen after the pass": (ROW | {"backward": "a block frozen before"}, "exact"),
    "a row whose graph is retained": (ROW | {"backward": "twice"}, "exact"),
    "a row whose graph is freed": (ROW | {"backward": "freed"}, "torch refuses"),
    "inputs by keyword": ({"blocks": (SIDE, SIDE), "sides": "shared", "keywords": True}, "exact"),
    **{
        f"more than a state in a {kind}": ({"blocks": (replace(BLOCK, returns=kind),) * 3, "rest": True}, "exact")
        for kind in ("tuple", "list", "dictionary", "dataclass", "named tuple", "model output")
    },
    "the taps' backward after that of the last state": (
        {"taps": tapped(0), "backward": "taps of a freed graph"},
        "refused: Trying to backward through a chain a second time",
    ),
    "the gradient of a state": (
        {"taps": tapped(0), "backward": "grad of states"},
        "refused: torch.autograd.grad cannot return the gradient of a state",
    ),
    "the gradients of a state and of parameters": (
        {"taps": tapped(0), "backward": "grad of states and parameters"},
        "refused: torch.autograd.grad cannot return the gradient of a state",
    ),
    "the gradient of a last state with extra outputs": (
        {"blocks": (BLOCK, PAIR), "rest": True, "taps": tapped(1), "backward": "grad of states"},
        "refused: torch.autograd.grad cannot return the gradient of a state",
    ),
    "a refused gradient of a state and then backward": (
        {"taps": tapped(0), "backward": "grad of states, then backward"},
        "exact",
    ),
    "the gradient of the stem with losses inside": (
        {"blocks": (replace(BLOCK, keeps="input"),) * 3, "kept": True, "backward": "grad of the stem"},
        "exact",
    ),
    "a loss only inside a block": (
        {"blocks": (replace(BLOCK, keeps="branch"),) * 2, "kept": True, "loss": "no last state"},
        "refused: the loss uses a tensor from inside …, but no state",
    ),
    "an older state from a closure": (
        {"blocks": (BLOCK, *blocks(("operations", ("older state",))))},
        "refused: … uses another state of a chain",
    ),
    "an input of the model from a closure": (
        {"blocks": blocks(("operations", ("input of the model",))), "input": True},
        "refused: … uses a tensor of shape",
    ),
    "a hook on a block's input": ({"blocks": blocks(("operations", ("hook",)))}, "refused: … puts a gradient hook"),
    "a parameter of the model from a closure": ({"blocks": blocks(("operations", ("outside",)))}, "exact"),
    "a block that changes its input in place": (
        {"blocks": (replace(BLOCK, form="relu_(x)"), BLOCK)},
        "refused: … modifies its input in place",
    ),
    "a hook on a last state that its block keeps for the loss": (
        {"blocks": blocks(("keeps", "state")), "kept": True, "end": "hook"},
        "refused: the output of … has a gradient hook",
    ),
    "a hook by a block that returns its input": (
        {"blocks": blocks(("operations", ("hook",)), ("form", "x"))},
        "refused: … puts a gradient hook",
    ),
    "a hook on the output of a block that returns its input, and a loss on that input, too": (
        {"blocks": blocks(("form", "x")), "between": behind(1, "doubling hook"), "taps": tapped(0)},
        "exact",
    ),
    "a hook by a block on its input, and a loss on nothing else than that input": (
        {"blocks": (replace(BLOCK, operations=("hook",)), BLOCK), "loss": "no last state", "taps": tapped(8)},
        "refused: … puts a gradient hook",
    ),
    "a hook by a block on its input, and a loss on what a later block keeps": (
        {"blocks": (replace(BLOCK, operations=("hook",)), replace(BLOCK, keeps="branch")), "kept": True},
        "refused: … puts a gradient hook",
    ),
    "a block that returns its input, changed in place": ({"blocks": blocks(("form", "x += g"))}, "exact"),
    "a block that changes in place what the loss uses": (
        {"blocks": blocks(("form", "relu_(x)")), "between": behind(0, "sum")},
        "refused: … changes its input in place",
    ),
    "a change in place of an output that its block keeps": (
        {
            "blocks": (replace(BLOCK, keeps="state"), BLOCK),
            "kept": True,
            "between": behind(0, "change in place"),
            "backward": "retained",
        },
        "refused: the output of … shares memory",
    ),
    "a change in place of states that are needed": (
        {"blocks": (LINEAR, LINEAR), "taps": tapped(0), "end": "states change"},
        "torch refuses",
    ),
    "a state that is not the first output": (
        {"blocks": blocks(("returns", "second"))},
        "refused: … returned tuple, in which the next state is not found",
    ),
    "a reentrant checkpoint inside a block": (
        {"blocks": blocks(("operations", ("reentrant",)))},
        "refused: … has a checkpoint with use_reentrant=True",
    ),
}
"""Programs for each of several engines, with their outcomes and why a chain is split."""
DESCRIBED = {name: (Program(**changes), outcome) for name, (changes, outcome) in FOUND.items()} | {
    f"{name}, {known}": (Program(engine=engine(known), **changes), outcome)
    for name, (changes, outcome) in UNUSUAL.items()
    for known in ("backprop", "highway_bp", "fixed_point", "truncated")
}
