"""One of several ranks: models whose blocks are on the first two, three or more, compared with one process.

Writes, by case, how many gradients this rank has, all the same to 1e-10; what was wrong otherwise. Two ranks alone take
a few cases.
"""

import os
import sys
from datetime import timedelta
from itertools import product

import torch
from pairwise import cover
from rank_processes import leave
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree.errors import ChainError
from gradfree.testing.cases.models import BLOCKS, Model, Plain, assert_equal_gradients, gradients

LENGTH = 7
RANK = int(os.environ.get("RANK", "0"))


class Pair(Plain):
    """Returns its state in a tuple and takes it by keyword, as the blocks of transformers do."""

    def forward(self, *, hidden, scale=None, index=None):
        return super().forward(hidden, scale), None


class Named(nn.Module):
    """Blocks with keyword arguments, a dictionary of outputs."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Pair() for _ in range(LENGTH)])
        self.head = nn.Linear(6, 11)

    def forward(self, x, checkpointed=False):
        hidden, scale = self.tokens(x), (x % 3).unsqueeze(-1).double()
        for layer in self.layers:
            if checkpointed:
                hidden, _ = checkpoint(run, layer, hidden, scale, use_reentrant=False)
            else:
                hidden, _ = run(layer, hidden, scale)
        return {"logits": self.head(hidden), "note": "none", "last": hidden}


def run(layer, hidden, scale):
    return layer(hidden=hidden, scale=scale, index=0)


class HeadFirst(nn.Module):
    """What runs behind the blocks is registered before them, and the stem behind them."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)
        self.scale, self.frozen = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))
        self.layers = nn.ModuleList([Plain() for _ in range(LENGTH)])
        self.stem = nn.Linear(6, 6)

    def forward(self, x):
        state = self.stem(x)
        for layer in self.layers:
            state = layer(state)
        out = nn.functional.linear(self.norm(state * self.frozen), self.head.weight, self.head.bias) * self.scale
        with torch.no_grad():
            self.mean.lerp_(out.mean(0), 0.1)
        return out


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


def shared():
    """The first two blocks share their weights, and are on one rank."""
    model, x = plain()
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    return model, x


def gpt():
    model = gradfree.create_model("gpt", vocab_size=13, context=5, layers=4, width=6, heads=2)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
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
    """Two forward passes and one backward pass through both."""
    return torch.cat([model(x), model(2 * x)])


def compiled(model, x):
    return torch.compile(model, backend="eager")(x)


def tapped(model, x):
    return model(x, taps=(4, 6))


EXACT = {
    **{kind: (lambda kind=kind: plain(kind), once, {}) for kind in BLOCKS},
    "an embedding and a head": (gpt, once, {}),
    "keyword arguments, tuples, dictionaries": (lambda: (Named(), torch.randint(11, (3, 4))), logits, {}),
    "checkpoints": (lambda: (Named(), torch.randint(11, (3, 4))), checkpointed, {}),
    "a head that is registered first": (lambda: (HeadFirst(), torch.randn(4, 6)), once, {}),
    "shapes that change": (lambda: (Narrowing(), torch.randn(4, 6)), once, {}),
    "frozen stem": (lambda: frozen("stem"), once, {}),
    "frozen first blocks": (lambda: frozen("stem", "blocks.0", "blocks.1", "blocks.2", "blocks.3"), once, {}),
    "frozen last blocks": (lambda: frozen("blocks.4", "blocks.5", "blocks.6", "heads"), once, {}),
    "shared by blocks": (shared, once, {}),
    "two passes": (plain, twice, {}),
    "compiled": (plain, compiled, {}),
    "a loss on states of the last rank": (plain, tapped, {"costs": [9, 9, 9, 9, 1, 1, 1]}),
    "costs": (plain, once, {"costs": [9, 1, 1, 1, 1, 5, 5]}),
    "two passes, shared by blocks": (shared, twice, {}),
}
"""Functions that make model and input, a function that runs them, and options."""

SWEPT = {
    "plain": (plain, once, {}),
    "two passes": (plain, twice, {}),
    "an embedding and a head": (gpt, once, {"costs": [1] * 8}),
    "a head that is registered first": EXACT["a head that is registered first"],
    "post-LN": (lambda: plain("post-LN"), once, {}),
    "post-activation ResNet": (lambda: plain("post-activation ResNet"), once, {}),
    "highway layers": (lambda: plain("highway layers"), once, {}),
    "keyword arguments, tuples, dictionaries": (lambda: (Named(), torch.randint(11, (3, 4))), logits, {}),
}

SWEEPING = {
    "highway_bp": {},
    "highway_bp, gamma": {"gamma": 0.2},
    "fixed_point": {},
}
FEW = ("plain", "an embedding and a head", "a head that is registered first", "two passes")


def exact_cases(ranks):
    """Yield cases with all pairs of a model, a number of ranks and an engine, with enough iterations to be exact."""
    few = ranks == 2
    for name, n, engine in cover(product(FEW if few else EXACT, range(2, ranks + 1), ("backprop", "highway_bp"))):
        options = {"iterations": n - 1} if engine == "highway_bp" else {}
        yield (name, n, engine), EXACT[name], engine, options


def swept_cases(ranks):
    """Yield cases with all pairs of a model, a number of ranks and an engine, with fewer iterations than are exact."""
    sweeps = [(n, k) for n in range(2, ranks + 1) for k in range(n - 1)]
    for name, (n, k), engine in cover(product(FEW if ranks == 2 else SWEPT, sweeps, SWEEPING)):
        yield (name, n, k, engine), SWEPT[name], engine.partition(",")[0], {"iterations": k, **SWEEPING[engine]}


def made(make):
    torch.manual_seed(0)
    return make()


def chain_of(model):
    (name,) = [name for name, child in model.named_children() if isinstance(child, nn.ModuleList | nn.Sequential)]
    return name


def of_one_process(make, run, engine=None, **options):
    """Return the outputs, the gradients and, after several passes, the state of one process."""
    model, x = made(make)
    if engine is not None:
        gradfree.create_engine(engine, **options).attach(model, [chain_of(model)])
    with torch.no_grad():
        out = run(model, x)
    passes = [gradients(model, lambda: run(model, x)) for _ in range(2)]
    return out, passes[0], {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def held_against(expected, make, run, group, placed, solver):
    """Return the number of gradients of a model on ranks, after comparing them with those of one process."""
    model, x = made(make)
    stage = gradfree.layer_parallel(model, solver, mesh=group, chains=[chain_of(model)], **placed)
    out, its, state = expected
    with torch.no_grad():
        its_out = run(model, x)
    passes = [gradients(model, lambda: run(model, x)) for _ in range(2)]
    its_state = stage.state_dict()
    # Ranks no longer wait for each other here.
    assert torch.equal(its_out, out)
    for found in passes:
        assert_equal_gradients(found, {name: its[name] for name in found})
    if its_state:
        assert list(its_state) == list(state)
        torch.testing.assert_close(its_state, state, rtol=1e-10, atol=1e-10)
    return len(found)


def expectations(cases, ranks):
    """Return the results of one process; each rank computes a share of them for all."""
    wanted = {}
    for swept, (name, n, *rest), model, engine, options in cases:
        # With enough iterations the gradients are autograd's, for any number of ranks and any engine.
        its = (engine, options | {"segments": n}) if swept else (None, {})
        wanted[(name, n, *rest) if swept else name] = (*model[:2], *its)
    mine = {key: of_one_process(*its, **options) for key, (*its, options) in list(wanted.items())[RANK::ranks]}
    shares = [None] * ranks
    distributed.all_gather_object(shares, mine)
    return {key: found for share in shares for key, found in share.items()}


def outcome(expected, group, model, engine, options):
    try:
        return held_against(expected, *model[:2], group, model[2], gradfree.create_engine(engine, **options))
    except (AssertionError, ChainError) as error:
        return f"{type(error).__name__}: {error}"


def main(folder):
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks = distributed.get_world_size()
    groups = {n: distributed.new_group(list(range(n))) for n in range(2, ranks + 1)}
    cases = [(swept, *case) for swept in (False, True) for case in (swept_cases if swept else exact_cases)(ranks)]
    expected, found = expectations(cases, ranks), {}
    for swept, case, *its in cases:
        if case[1] > RANK:
            found[(swept, *case)] = outcome(expected[case if swept else case[0]], groups[case[1]], *its)
    torch.save(found, os.path.join(folder, f"{RANK}.pt"))
    leave()


if __name__ == "__main__":
    main(sys.argv[1])
