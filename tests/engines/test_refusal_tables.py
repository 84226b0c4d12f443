"""Each refusal in the tables of ``gradfree.errors`` is raised, in chains of blocks and in time."""

import math
import re
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from recomputing import Recomputed, RecomputedCell
from torch import nn
from torch.autograd import forward_ad
from torch.jit.frontend import NotSupportedError
from torch.nn.utils.parametrizations import spectral_norm

import gradfree
from gradfree import ChainError, errors
from gradfree.errors import REFUSALS
from gradfree.testing.cases.models import Model, NormAndDropout, Plain, plain_model

X = (5, 6)


def blocks():
    return plain_model(), "highway_bp"


def gru():
    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.GRU(6, 6, batch_first=True)), "dsf"


def cell(inner=None):
    return nn.Sequential(nn.Unflatten(1, (1, 6)), gradfree.CellLayer(inner or nn.GRUCell(6, 6), True)), "dsf"


def out_of(model, x):
    out = model(x)
    return out[0] if isinstance(out, tuple) else out


def behind(do):
    """Return programs that do something with a pass of a model with an engine, one for each model."""

    def refused(make):
        model, engine = make()
        with gradfree.create_engine(engine).attach(model):
            do(model, torch.randn(X, requires_grad=True))

    return refused


def attaching(change, *makes):
    """Return a program that attaches an engine to a changed model."""

    def refused(make):
        model, engine = make()
        change(model)
        gradfree.create_engine(engine).attach(model)

    return refused, makes


def second_derivatives(model, x):
    torch.autograd.grad(out_of(model, x).sum(), x, create_graph=True)


def transform(model, x):
    torch.func.grad(lambda x: out_of(model, x).sum())(x.detach())


def forward_mode(model, x):
    with forward_ad.dual_level():
        model(forward_ad.make_dual(x, torch.ones_like(x)))


def traced(model, x):
    torch.jit.trace(model, (x.detach(),))


def compiled_autograd(model, x):
    import torch._dynamo.compiled_autograd

    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out_of(model, x).sum().backward()


def many(model, x):
    out = out_of(model, x)
    torch.autograd.grad(out, x, torch.ones(2, *out.shape), is_grads_batched=True)


def in_place(model, x):
    h = 1.0 * x
    out = out_of(model, h)
    h.add_(1.0)
    out.sum().backward()


def chunk_twice(make):
    model, _ = make()
    with gradfree.create_engine("rtrl", stream=True).attach(model):
        loss = out_of(model, torch.randn(X)).sum()
        for keep in (True, False):
            loss.backward(retain_graph=keep)


def not_finite(model, x):
    with torch.autograd.detect_anomaly(), warnings.catch_warnings():
        (math.inf * out_of(model, x)).sum().backward()


def made_infinite(model, x):
    for p in model.parameters():
        p.data.fill_(math.inf)
    with torch.autograd.detect_anomaly(), warnings.catch_warnings():
        out_of(model, x).sum().backward()


def attach_again(model):
    gradfree.create_engine("fixed_point").attach(model)


def backward_hooks(model):
    inner = model.blocks[1].linear if hasattr(model, "blocks") else model[1].cell
    inner.register_full_backward_hook(lambda *_: None)


def forward_hooks(model):
    list(model.modules())[-1].register_forward_hook(lambda *_: None)


def spectral(model):
    spectral_norm(model[0])


def layers():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), "pepita"


class Flags:
    """Has slots, which are not watched."""

    __slots__ = ("cuts", "stores")

    def __init__(self):
        self.stores = self.cuts = False


FLAGS = Flags()


class Sharing(nn.Linear):
    """A block that cuts the graph of its input, or stores it, if flags outside say so."""

    def __init__(self):
        super().__init__(6, 6)
        self.stored = None

    def forward(self, x):
        self.stored = x if FLAGS.stores else None
        return (x.detach() if FLAGS.cuts else x) + super().forward(x)


def row():
    FLAGS.stores = FLAGS.cuts = False
    return nn.Sequential(Sharing(), Sharing(), Sharing()), "fixed_point"


class CuttingCell(nn.GRUCell):
    """A cell that cuts the graph of its input if a flag outside says so."""

    def forward(self, x, h):
        return super().forward(x.detach() if FLAGS.cuts else x, h)


def cutting_cell():
    FLAGS.cuts = False
    return cell(CuttingCell(6, 6))


def changed_between(model, x):
    out = out_of(model, x)
    FLAGS.cuts = True
    out.sum().backward()


def stored_late(model, x):
    out_of(model, x)
    FLAGS.stores = True
    out_of(model, x)


class Recursive(nn.Linear):
    """A block that calls itself."""

    def forward(self, x, deep=True):
        return x + (self(x, False) if deep else super().forward(x))


def recursive():
    return nn.Sequential(nn.Tanh(), Recursive(6, 6), Recursive(6, 6), Recursive(6, 6)), "deeppcr"


class Acting(nn.GRUCell):
    """It does something to its state first."""

    def __init__(self, act):
        super().__init__(3, 6)
        self.act = act

    def forward(self, x, h):
        self.act(h)
        return super().forward(x, h)


def acting(act):
    run = behind(lambda model, x: out_of(model, x).sum().backward())
    return run, [lambda: (nn.Sequential(nn.Unflatten(1, (2, 3)), gradfree.CellLayer(Acting(act), True)), "dsf")]


def normed(engine):
    return lambda: (Model([NormAndDropout(), NormAndDropout()]), engine)


def complex_blocks():
    return plain_model().to(torch.complex128), "deeppcr"


def complex_cell():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))

        def forward(self, x, h):
            return torch.tanh(h @ self.weight + x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = gradfree.CellLayer(Cell())

        def forward(self, x):
            return self.layer(x.unsqueeze(1), torch.zeros_like(x[:1]))

    return Net(), "deeppcr"


def lazy(model):
    model.blocks[1].late = nn.LazyLinear(3)


def scripted(model):
    model.blocks[1].inner = torch.jit.script(nn.Linear(3, 3))


class Dropping(nn.GRUCell):
    def __init__(self):
        super().__init__(6, 6)
        self.dropout = nn.Dropout(0.5)


def with_checkpoint():
    model = plain_model()
    inner = model.blocks[1].forward
    model.blocks[1].forward = lambda x: Recomputed.apply(inner, x)
    return model, "highway_bp"


def cell_with_checkpoint():
    return cell(RecomputedCell(6, 6))


def scan_step():
    seen = []

    def step(h, x):
        if h.abs().sum() is not None and len(seen) == 0 and torch._C._functorch.is_batchedtensor(h):
            seen.append(h)
        return 0.5 * h + x, h

    return step


def changing_later(make):
    gradfree.scan(make(), torch.zeros(6), torch.randn(9, 6), engine=gradfree.create_engine("shooting", segments=3))


PROGRAMS = {
    errors.SECOND_DERIVATIVES: (behind(second_derivatives), (blocks, gru, cell)),
    errors.TRANSFORM: (behind(transform), (blocks, gru, cell)),
    errors.OTHER_PASS: (behind(forward_mode), (blocks, gru, cell)),
    errors.MANY_COTANGENTS: (behind(many), (blocks, gru, cell)),
    errors.CHANGED_IN_PLACE: (behind(in_place), (gru, cell)),
    errors.CHUNK_TWICE: (chunk_twice, (gru, cell)),
    errors.NO_LESSON: (behind(lambda model, x: model(x).sum().backward()), (lambda: (layers()[0], "drtp"),)),
    errors.NOT_FINITE_BEHIND: (behind(not_finite), (gru, cell)),
    errors.NOT_FINITE_INSIDE: (behind(made_infinite), (gru,)),
    errors.SETTINGS_CHANGED: (behind(changed_between), (row, cutting_cell)),
    errors.STORED_IN_ROW: (behind(stored_late), (row,)),
    errors.STEP_CHANGED: (changing_later, (scan_step,)),
    errors.ATTACHED: attaching(attach_again, blocks, gru, cell),
    errors.BACKWARD_HOOKS: attaching(backward_hooks, blocks, cell),
    errors.FORWARD_HOOKS: attaching(forward_hooks, cell),
    errors.HOOKED_STATE: acting(lambda h: h.requires_grad and h.register_hook(torch.neg)),
    errors.HOOK_WITHOUT_GRAPH: acting(lambda h: (2 * h).register_hook(torch.neg)),
    errors.CHANGED_STATE: acting(lambda h: h.mul_(0.5)),
    errors.RANDOM_CELL: attaching(lambda model: None, lambda: cell(Dropping())),
    errors.CALLS_ITSELF: (behind(lambda model, x: out_of(model, x).sum().backward()), (recursive,)),
    errors.WEIGHT_WITH_STATE: attaching(spectral, layers),
    errors.MIXES: (
        behind(lambda model, x: out_of(model, x).sum().backward()),
        map(normed, ("deeppcr", "forward_gradient")),
    ),
    errors.HIDDEN_PARAMETER: (
        behind(lambda model, x: out_of(model, x).sum().backward()),
        (with_checkpoint, cell_with_checkpoint),
    ),
    errors.COMPLEX_JACOBIAN: (
        behind(lambda model, x: out_of(model, x.to(torch.complex128)).abs().sum().backward()),
        (complex_blocks, complex_cell),
    ),
    errors.SCRIPTED: attaching(scripted, blocks),
    errors.LAZY: attaching(lazy, blocks),
}


def assert_refused(refusal, run):
    """Assert that the program raises the message of the table, with names in place of the braces."""
    said = re.sub(r"\\\{\w+\\\}", ".+", re.escape(f"{refusal.why} {refusal.remedy}"))
    with pytest.raises(ChainError, match=said):
        run()


CELLS = {
    f"{refusal.case}: {getattr(make, '__name__', 'cell')}": (refusal, refused, make)
    for refusal, (refused, makes) in PROGRAMS.items()
    for make in makes
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CELLS)
def test_every_refusal_raises_its_message(case):
    refusal, refused, make = CELLS[case]
    assert_refused(refusal, lambda: refused(make))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("other", [traced, compiled_autograd])
@pytest.mark.parametrize("make", [blocks, gru, cell])
def test_other_passes_are_refused(other, make):
    assert_refused(errors.OTHER_PASS, lambda: behind(other)(make))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: (nn.GRU(6, 6), "shooting"), "can't take variable number of arguments"),
        (lambda: (nn.Sequential(*[Plain() for _ in range(3)]), "highway_bp"), "Only a single generator"),
        (layers, "NamedExpr aren't supported"),
    ],
)
def test_scripting_is_refused_by_torch_until_the_engine_is_detached(make, error):
    """With the words that ``docs/start/limits.md`` quotes."""
    model, engine = make()
    with gradfree.create_engine(engine).attach(model), pytest.raises(NotSupportedError, match=error):
        torch.jit.script(model)
    torch.jit.script(model)


def test_global_module_hooks_are_refused():
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert_refused(errors.GLOBAL_HOOKS, lambda: gradfree.create_engine("dsf").attach(cell()[0]))
    finally:
        hook.remove()


def test_blocks_that_fsdp_shards_are_refused(monkeypatch):
    """They are recognized by the class that FSDP gives them."""

    class Sharded(nn.Module):
        pass

    fsdp = SimpleNamespace(FSDPModule=Sharded, FullyShardedDataParallel=Sharded)
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", fsdp)
    model, engine = blocks()
    block = model.blocks[1]
    block.__class__ = type("FSDPBlock", (Sharded, type(block)), {})
    assert_refused(errors.SHARDED, lambda: gradfree.create_engine(engine).attach(model, ["blocks"]))


def test_every_refusal_is_tested():
    # Refusals of ranks are tested in tests/ranks.
    rows = {row for family in REFUSALS if family != "Blocks on ranks" for row in REFUSALS[family]}
    assert rows == {*PROGRAMS, errors.GLOBAL_HOOKS, errors.SHARDED}
