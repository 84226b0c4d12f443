"""One of several ranks: models whose blocks lie on the first two, three and so on, held against one process.

Writes, by case, how many gradients this rank has, all the same to 1e-10; what was wrong otherwise. Two ranks alone take
a few cases.
"""

import os
import sys
from datetime import timedelta
from itertools import product

import torch
from rank_processes import leave
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree.errors import ChainError
from gradfree.ranks.placement import balanced
from gradfree.testing.cases.models import BLOCKS, Model, Plain, assert_equal_gradients, gradients

LENGTH = 7
RANK = int(os.environ.get("RANK", "0"))


class Pair(Plain):
    """Returns its state in a tuple, as the blocks of transformers do, and takes it by keyword."""

    def forward(self, *, hidden, scale=None):
        return super().forward(hidden, scale), None


class Named(nn.Module):
    """Blocks with keyword arguments, an embedding that is the head too, a dictionary of outputs."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Pair() for _ in range(LENGTH)])
        self.head = nn.Linear(6, 11)
        self.head.weight = self.tokens.weight

    def forward(self, x, checkpointed=False):
        hidden, scale = self.tokens(x), (x % 3).unsqueeze(-1).double()
        for layer in self.layers:
            if checkpointed:
                hidden, _ = checkpoint(run, layer, hidden, scale, use_reentrant=False)
            else:
                hidden, _ = run(layer, hidden, scale)
        return {"logits": self.head(hidden), "note": "none", "last": hidden}


def run(layer, hidden, scale):
    return layer(hidden=hidden, scale=scale)


class Narrowing(nn.Module):
    """Blocks of which some change the shape."""

    def __init__(self):
        super().__init__()
        shaped = [
            nn.Sequential(nn.Linear(6, 5)),
            Plain(5),
            nn.Sequential(nn.Linear(5, 4)),
            Plain(4),
            Plain(4),
            Plain(4),
        ]
        self.blocks = nn.ModuleList([Plain(), *shaped])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def plain(kind="plain", **options):
    make, shape = BLOCKS[kind]
    return Model([make(**options) for _ in range(LENGTH)], shape[-1]).eval(), torch.randn(shape)


def frozen(*names):
    model, x = plain()
    for name, parameter in model.named_parameters():
        if name.startswith(names):
            parameter.requires_grad_(False)
    return model, x


def albert():
    """Three blocks in turns have the same weights."""
    model, x = plain()
    for i in range(3, LENGTH):
        model.blocks[i].linear.weight = model.blocks[i % 3].linear.weight
    return model, x


def gpt():
    model = gradfree.create_model("gpt", vocab_size=13, context=5, layers=4, width=6, heads=2)
    for layer in model.sublayers.modules():
        getattr(layer, "reset_parameters", lambda: None)()
    return model, torch.randint(13, (2, 5))


def once(model, x):
    return model(x)


def logits(model, x):
    return model(x)["logits"]


def checkpointed(model, x):
    return model(x, checkpointed=True)["logits"]


def twice(model, x):
    """Two passes, and one backward pass through both."""
    return torch.cat([model(x), model(2 * x)])


def tapped(*taps):
    def run(model, x):
        return model(x, taps=taps)

    run.taps = taps
    return run


EXACT = {
    **{kind: (lambda kind=kind: plain(kind), once, {}) for kind in BLOCKS},
    "tied embedding": (gpt, once, {}),
    "keyword arguments, tuples, dictionaries": (lambda: (Named(), torch.randint(11, (3, 4))), logits, {}),
    "checkpoints": (lambda: (Named(), torch.randint(11, (3, 4))), checkpointed, {}),
    "shapes that change": (lambda: (Narrowing(), torch.randn(4, 6)), once, {}),
    "frozen stem": (lambda: frozen("stem"), once, {}),
    "frozen first blocks": (lambda: frozen("stem", "blocks.0", "blocks.1", "blocks.2", "blocks.3"), once, {}),
    "frozen last blocks": (lambda: frozen("blocks.4", "blocks.5", "blocks.6", "heads"), once, {}),
    "shared by blocks": (albert, once, {}),
    "two passes": (plain, twice, {}),
    "taps": (plain, tapped(0, 1, 3, 6), {}),
    "taps of one rank, one at its end": (plain, tapped(1, 2, 3, 4, 6), {}),
    "costs": (plain, once, {"costs": [9, 1, 1, 1, 1, 5, 5]}),
}
"""What makes a model and an input, what runs it, options."""

SWEPT = {
    "plain": (plain, once, {}),
    "taps": (plain, tapped(0, 2, 3, 6), {}),
    "tied embedding": (gpt, once, {"costs": [1] * 8}),
    "post-LN": (lambda: plain("post-LN"), once, {}),
    "post-activation ResNet": (lambda: plain("post-activation ResNet"), once, {}),
    "highway layers": (lambda: plain("highway layers"), once, {}),
    "keyword arguments, tuples, dictionaries": (lambda: (Named(), torch.randint(11, (3, 4))), logits, {}),
}

SWEEPING = ({"name": "highway_bp"}, {"name": "highway_bp", "gamma": 0.2}, {"name": "fixed_point"})
FEW = ("plain", "tied embedding")


def made(make):
    torch.manual_seed(0)
    return make()


def held_against(make, run, group, options, engine, segments):
    """Return how many gradients of a model on ranks there are, the same as those of one process."""
    one, x = made(make)
    on_ranks, _ = made(make)
    (chain,) = [name for name, child in one.named_children() if isinstance(child, nn.ModuleList | nn.Sequential)]
    if segments is not None:
        gradfree.create_engine(**engine, segments=segments).attach(one, [chain])
    costs = options.get("costs") or [sum(p.numel() for p in block.parameters()) for block in one.get_submodule(chain)]
    last = balanced(costs, distributed.get_world_size(group))[-1]
    taps = [f"{chain}.{tap}" for tap in getattr(run, "taps", ()) if tap < last.start]
    solver = gradfree.create_engine(**engine)
    gradfree.layer_parallel(on_ranks, solver, mesh=group, chains=[chain], taps=taps, **options)
    with torch.no_grad():
        assert torch.equal(run(one, x), run(on_ranks, x))
    for _ in range(2):
        expected = gradients(one, lambda: run(one, x))
        found = gradients(on_ranks, lambda: run(on_ranks, x))
        assert_equal_gradients(found, {name: expected[name] for name in found})
    return len(found)


def outcome(*args):
    try:
        return held_against(*args)
    except (AssertionError, ChainError) as error:
        return f"{type(error).__name__}: {error}"


def main(folder):
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    found, few = {}, distributed.get_world_size() == 2
    for n in range(2, distributed.get_world_size() + 1):
        group = distributed.new_group(list(range(n)))
        for name, (make, run, options) in EXACT.items():
            for engine in ({"name": "backprop"}, {"name": "highway_bp", "iterations": n - 1}):
                if n > RANK and (name in FEW or not few):
                    found["exact", name, n, engine["name"]] = outcome(make, run, group, options, engine, None)
        for (name, (make, run, options)), k, engine in product(SWEPT.items(), range(n - 1), SWEEPING):
            if n > RANK and (name in FEW or not few):
                case = make, run, group, options, {**engine, "iterations": k}, n
                found["swept", name, n, k, str(engine)] = outcome(*case)
    torch.save(found, os.path.join(folder, f"{RANK}.pt"))
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
