"""What programs do around a call: checkpoints, retained graphs, hooks, autocast, several calls, nested transforms."""

from functools import partial

import pytest
import torch
from oracles import off_by
from scan_tasks import loop
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree import ChainError, create_engine

T, B, H = 60, 3, 5
ENGINES = {
    "shooting": create_engine("shooting", segments=5, burn=9, max_sweeps=4, tolerance=1e-14),
    "newton": create_engine("newton", max_sweeps=T, tolerance=1e-14),
}


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]


@pytest.fixture
def at_once(engine):
    """``scan`` of all steps at once."""
    return partial(gradfree.scan, engine=engine)


class Program:
    def __init__(self):
        torch.manual_seed(0)
        self.cell, self.x = nn.RNNCell(H, H), torch.randn(T, B, H, requires_grad=True)
        with torch.no_grad():
            self.cell.weight_hh.mul_(0.7)
        self.leaves = [self.x, *self.cell.parameters()]

    def run(self, scan, start=None):
        def step(h, x):
            h = self.cell(x, h)
            return h, h

        return scan(step, torch.zeros(B, H) if start is None else start, self.x)

    def loss(self, scan):
        h, y = self.run(scan)
        return y.sin().sum() + h.square().sum()


def grads(loss, program, **options):
    return torch.autograd.grad(loss, program.leaves, **options)


def expected():
    program = Program()
    return grads(program.loss(loop), program)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_a_call(reentrant, at_once):
    program = Program()
    loss = checkpoint(lambda x: program.loss(at_once), program.x, use_reentrant=reentrant)
    loss.backward()
    assert off_by([leaf.grad for leaf in program.leaves], expected()) < 1e-10


def test_a_retained_graph_gives_the_gradients_again_and_a_freed_one_raises(at_once):
    program = Program()
    loss = program.loss(at_once)
    grads(loss, program, retain_graph=True)
    assert off_by(grads(3 * loss, program), [3 * g for g in expected()]) < 1e-10
    with pytest.raises(RuntimeError, match="second time"):
        grads(loss, program)


def test_second_derivatives_are_refused(at_once):
    program = Program()
    with pytest.raises(ChainError, match="create_graph=True"):
        grads(program.loss(at_once), program, create_graph=True)


def test_hooks_on_parameters_see_the_whole_gradient_once(at_once):
    program, seen = Program(), []
    program.cell.weight_hh.register_hook(lambda g: seen.append(g.clone()))
    grads(program.loss(at_once), program)
    assert len(seen) == 1
    assert off_by(seen, expected()[2:3]) < 1e-10


def test_a_carry_goes_through_several_calls_and_outputs_may_be_changed_in_place(at_once):
    found = []
    for scan in (loop, at_once):
        program = Program()
        h, first = program.run(scan)
        first += 1
        _, second = program.run(scan, h)
        found.append(grads((first * second).sum(), program))
    assert off_by(*found[::-1]) < 1e-10


@pytest.mark.parametrize("engine", ["backprop", *ENGINES.values()], ids=str)
def test_hooks_on_the_last_carry_see_its_own_gradient_only(engine):
    """Not that of the same tensor in y, since segments return another one, and calls are timed in both ways."""
    program = Program()
    h, y = program.run(partial(gradfree.scan, engine=engine))
    seen = []
    h.register_hook(lambda g: seen.append(g) or torch.zeros_like(g))
    found = grads(y.sin().sum() + h.square().sum(), program, retain_graph=True)
    assert off_by(seen, [2 * h.detach()]) < 1e-10
    assert off_by(found, grads(y.sin().sum(), program)) < 1e-10


@pytest.mark.filterwarnings("ignore:.*runs step by step. the step changes seen")
def test_a_hook_for_all_modules_that_keeps_something_runs_step_by_step(at_once):
    """Torch calls it at each step of a loop."""
    program, seen, found = Program(), [], []

    def noisy(module, args, out):
        seen.append(out)
        return out * (1 + 0.01 * (len(seen) % 7))

    # Not the program's own, of which calls would remember this.
    def step(h, x):
        h = program.cell(x, h)
        return h, h

    with torch.nn.modules.module.register_module_forward_hook(noisy):
        for scan in (loop, at_once):
            seen.clear()
            _, y = scan(step, torch.zeros(B, H), program.x)
            found.append(grads(y.sum(), program))
            assert len(seen) == T
    assert off_by(*found[::-1]) < 1e-10


def test_a_step_in_segments_may_ask_whether_gradients_are_enabled():
    at_once = partial(gradfree.scan, engine=ENGINES["shooting"])

    def step(h, x):
        h = torch.tanh(0.5 * h + x)
        return h, h if torch.is_grad_enabled() else -h

    x = torch.randn(T, B, H)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            found, expected = (scan(step, torch.zeros(B, H), x)[1] for scan in (at_once, loop))
        assert off_by([found], [expected]) < 1e-10


def test_a_step_that_fills_a_cache_runs_in_segments_from_the_second_call_on(recwarn):
    cache, x = {}, torch.randn(T, B, H, requires_grad=True)

    def step(h, x):
        h = torch.tanh(cache.setdefault(h.dtype, 0.5) * h + x)
        return h, h

    for cut in (False, True):
        with gradfree.engine_figures() as figures:
            _, y = gradfree.scan(step, torch.zeros(B, H), x, engine=ENGINES["shooting"])
            y.sum().backward()
        assert bool(figures) == cut
    assert not recwarn


class Rates(dict):
    def step(self, h, x):
        h = torch.tanh(self.setdefault(h.dtype, 0.5) * h + x)
        return h, h


class Others(Rates):
    def step(self, h, x):
        h = torch.sin(self.setdefault(h.dtype, 0.5) * h + x)
        return h, h


class Both(nn.Module):
    rates, others = Rates(), Others()

    def step(self, h, x):
        return self.rates.step(h, x)

    def other(self, h, x):
        return self.others.step(h, x)


@pytest.mark.parametrize("steps", [(Rates().step, Others().step), ((both := Both()).step, both.other)])
def test_methods_are_known_apart(steps, recwarn):
    x = torch.randn(T, B, H, requires_grad=True)
    for step in steps:
        for cut in (False, True):
            with gradfree.engine_figures() as figures:
                _, y = gradfree.scan(step, torch.zeros(B, H), x, engine=ENGINES["shooting"])
                y.sum().backward()
            assert bool(figures) == cut
    assert not recwarn


@pytest.mark.parametrize("options", [("shooting", {"segments": 5}), ("newton", {"max_sweeps": T})])
def test_autocast_has_the_loops_precision(options):
    found, engine = [], create_engine(options[0], **options[1])
    for scan in (loop, partial(gradfree.scan, engine=engine)):
        program = Program()
        program.cell.float()
        read = nn.Linear(H, H).float()
        program.leaves = list(read.parameters())

        def step(h, x, read=read):
            h = torch.tanh(read(0.3 * h + x)).float()
            return h, h

        with torch.autocast("cpu", torch.bfloat16):
            _, y = scan(step, torch.zeros(B, H, dtype=torch.float32), program.x.detach().float())
        found.append(grads(y.square().mean(), program))
    assert off_by(*found[::-1]) < 0.02


@pytest.mark.parametrize(("dim", "reverse"), [(0, True), (1, False), (-2, True)])
def test_dim_and_reverse_are_those_of_torchs_scan(dim, reverse, engine):
    x = torch.randn(4, 20, 3)

    def step(h, x):
        return 0.5 * h + x, (h.sum(-1), x)

    carry, (a, b) = gradfree.scan(step, torch.zeros(4, 3), x.movedim(1, dim), dim=dim, reverse=reverse, engine=engine)
    own = x.transpose(0, 1)
    h, sums = loop(lambda h, x: (0.5 * h + x, h.sum(-1)), torch.zeros(4, 3), own, reverse=reverse)
    assert off_by([carry, a.movedim(dim, 0), b], [h, sums, x.movedim(1, dim)]) < 1e-12


@pytest.mark.parametrize(
    ("xs", "engine", "error", "message"),
    [
        (torch.zeros(0, 3), "shooting", ValueError, "at least 1"),
        ((torch.zeros(4, 3), torch.zeros(5, 3)), "shooting", ValueError, "one length"),
        ([1.0], "shooting", TypeError, "xs must be tensors"),
        ((torch.zeros(4, 3), torch.tensor(1.0)), "shooting", ValueError, "no dim 0 for time"),
        (torch.zeros(4, 3), "dsf", ValueError, "cannot run a step function"),
    ],
)
def test_bad_arguments_are_refused(xs, engine, error, message):
    with pytest.raises(error, match=message):
        gradfree.scan(lambda h, x: (h, h), torch.zeros(3), xs, engine=engine)


def test_a_carry_that_cannot_be_compiled_is_refused():
    with pytest.raises(TypeError, match="tensors and None, not int"):
        gradfree.scan(lambda c, x: ((c[0] + x, c[1] + 1), x), (torch.zeros(3), 0), torch.zeros(4, 3), compile=True)


@pytest.mark.parametrize("engine", ["shooting", "newton", "backprop"])
@pytest.mark.parametrize("length", [9, 300])
@pytest.mark.parametrize(("found", "words"), [(lambda h: h, "a Tensor"), (lambda h: (h, h, h), "3 values")])
def test_a_step_that_returns_no_pair_is_refused(found, words, length, engine):
    """Python would take the two rows of a tensor for the carry and y."""
    with pytest.raises(TypeError, match=f"next carry and y, not {words}"):
        gradfree.scan(lambda h, x: found(h + x), torch.zeros(2, 3), torch.randn(length, 2, 3), engine=engine)


@pytest.mark.filterwarnings("ignore:.*runs step by step")
@pytest.mark.parametrize("engine", ["backprop", *ENGINES.values()], ids=str)
@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda h, x: ((h, h), h), "returns a tuple as the next carry, but init is one tensor"),
        (lambda x, h: (torch.tanh(h.sum() + x[:1]), x), r"a y of shape \(3, 4\) at the first step and of \(1, 4\)"),
    ],
    ids=["a pair as carry", "arguments in the other order"],
)
def test_a_wrong_carry_is_named(step, words, engine):
    with pytest.raises(TypeError, match=words):
        gradfree.scan(step, torch.zeros(3, 4), torch.randn(300, 2), engine=engine)


@pytest.mark.parametrize("engine", ["backprop", *ENGINES.values()], ids=str)
def test_a_number_in_y_is_refused(engine):
    with pytest.raises(TypeError, match="returns float in y"):
        gradfree.scan(lambda h, x: (h + x, 1.0), torch.zeros(2, 3), torch.randn(T, 2, 3), engine=engine)


@pytest.mark.parametrize("size", [1e-4, 1.0])
def test_a_tensor_that_changes_in_place_between_the_passes_is_refused(at_once, size):
    program = Program()
    weight = program.cell.weight_hh
    _, y = program.run(at_once)
    with torch.no_grad():
        weight.add_(size * torch.randn_like(weight))
    with pytest.raises(ChainError, match="were changed in place between the forward and the backward pass"):
        y.sum().backward()


def test_a_compiled_model_may_call_scan_with_a_closure(at_once):
    def train(scan):
        program = Program()
        return grads(program.loss(scan), program)

    found = torch.compile(train, backend="eager")(at_once)
    assert off_by(found, expected()) < 1e-10


def scripted_cell(x, h, weight):
    return 0.5 * torch.tanh(x) + 0.3 * torch.matmul(h, weight)


@pytest.mark.slow
def test_a_compiled_cell_runs_as_it_is_written(at_once, recwarn):
    """torch compiles as a whole neither in modes for functions nor in ``vmap``."""
    program = Program()
    program.cell = torch.compile(program.cell, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert off_by(grads(program.loss(at_once), program), expected()) < 1e-10
    assert not [w for w in recwarn if "runs step by step" in str(w.message)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script", "ignore:.*TorchScript has compiled")
def test_a_step_of_torchscript_runs_step_by_step(at_once):
    """Before its first call in a loop it would run under vmap, without its graph."""
    weight, x = torch.randn(H, H, requires_grad=True), torch.randn(T, B, H)
    cell = torch.jit.script(scripted_cell)

    def step(h, x):
        h = cell(x, h, weight)
        return h, h

    found = [scan(step, torch.zeros(B, H), x)[1] for scan in (at_once, loop)]
    assert off_by(*(torch.autograd.grad(y.square().sum(), weight) for y in found)) < 1e-10


def through_two_cells(scan, units=H):
    """Each step function means the cell of the last one after the calls, as closures in a loop do."""
    torch.manual_seed(0)
    out = x = torch.cat([torch.zeros(T - 12, B, units), torch.randn(12, B, units)]).requires_grad_()
    cells = [nn.Linear(units, units, bias=False) for _ in range(2)]
    cells[1].load_state_dict(cells[0].state_dict())
    for cell in cells:

        def step(h, x):
            h = 0.9999 * h + cell(x)  # noqa: B023
            return h, h

        _, out = scan(step, torch.zeros(B, units), out)
    return out, [x, *(cell.weight for cell in cells)]


@pytest.mark.filterwarnings("ignore:.*runs sequentially")
@pytest.mark.parametrize(("units", "size"), [(H, 1.0), (H + 1, torch.inf)])
def test_a_backward_pass_that_does_not_settle_takes_the_tensors_of_the_forward_pass(units, size):
    """With other units nothing is known of the first case."""
    engine, found = create_engine("shooting", segments=5, max_sweeps=1, tolerance=1e-14), []
    for run in (partial(gradfree.scan, engine=engine), loop):
        out, leaves = through_two_cells(run, units)
        e = torch.ones_like(out)
        e[T // 2] = size
        found.append(torch.autograd.grad(out, leaves, e))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*runs sequentially")
def test_a_step_that_would_take_other_tensors_when_it_runs_again_is_refused():
    out, leaves = through_two_cells(partial(gradfree.scan, engine=ENGINES["newton"]))
    with pytest.raises(ChainError, match="takes other tensors in the backward pass"):
        torch.autograd.grad(out, leaves, torch.full_like(out, torch.inf))


@pytest.mark.filterwarnings("ignore:.*runs sequentially")
def test_weights_may_be_unfrozen_before_an_overflow_in_the_backward_pass(at_once):
    program = Program()
    weight = program.cell.weight_hh.requires_grad_(False)
    # Not the other tests' step: what overflows runs sequentially for a while.
    _, y = at_once(lambda h, x: 2 * (program.cell(x, h),), torch.zeros(B, H), program.x)
    weight.requires_grad_()
    (found,) = torch.autograd.grad(y, program.x, torch.full_like(y, torch.inf))
    assert not found.isfinite().any()


class Settings:
    """What a step uses and no one can hash, with names of attributes that modules have, too."""

    def __init__(self):
        self.training, self._buffers, self._parameters = {"rate": 0.5}, [1], (2,)


def test_a_step_may_use_objects_with_the_names_of_a_modules_attributes(at_once):
    def make():
        settings, x = Settings(), torch.linspace(-1, 1, 2 * T).view(T, 2).requires_grad_()

        def step(h, x):
            h = torch.tanh(settings.training["rate"] * h + x)
            return h, h

        return step, torch.zeros(2), x

    found = []
    for run in (loop, at_once):
        step, start, x = make()
        found.append(torch.autograd.grad(run(step, start, x)[1].square().sum(), x)[0])
    assert off_by(found[1:], found[:1]) < 1e-10
