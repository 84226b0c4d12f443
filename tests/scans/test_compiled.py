"""Steps compiled in chunks: the loop's results, no compilation for closures made anew, one error for what breaks."""

import pytest
import torch
from oracles import off_by
from scan_tasks import CompiledTask, compare, loop
from surrogates import Scale, Spike
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree import CellLayer, ChainError
from gradfree.scans.knowledge import Contest, Way

T, B, I, H = 44, 2, 3, 8  # noqa: E741

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def traced_chunks(monkeypatch):
    """Run two steps as torch traces them: C++ takes two seconds for each graph, and has tests in test_generated.py."""
    compile = torch.compile

    def trace(chunk, options, **how):
        return compile(chunk, backend="aot_eager", **how)

    monkeypatch.setattr("gradfree.loops.compiled.CHUNK", 2)
    monkeypatch.setattr(torch, "compile", trace)


def made(net):
    """A closure that is made anew in every pass, with two states, a mask and None."""

    def step(carry, x):
        h, slow = carry["h"], carry["slow"]
        after = torch.tanh(net(torch.cat([x["x"], h, slow], -1)))
        h = torch.where(x["keep"], after, h)
        return {"h": h, "slow": 0.5 * slow + 0.4 * h, "none": None}, (h, slow.sum(-1))

    return step


@pytest.mark.parametrize("segments", [1, 4])
def test_compiled_steps_equal_the_loop_and_are_compiled_once(segments):
    net = nn.Linear(I + 2 * H, H)
    x = torch.randn(T, B, I, requires_grad=True)
    xs = {"x": x, "keep": torch.rand(T, B, 1) > 0.2}
    init = {"h": torch.zeros(B, H), "slow": torch.zeros(B, H), "none": None}
    engine = gradfree.create_engine("shooting", segments=segments, burn=8, max_sweeps=3, tolerance=1e-14)

    def gradients(run):
        carry, (y, z) = run(made(net), init, xs)
        loss = y.sin().sum() + z.square().sum() + carry["h"].sum()
        grads = torch.autograd.grad(loss, [x, *net.parameters()], retain_graph=True)
        again = torch.autograd.grad(loss, [x, *net.parameters()])
        return [y.detach(), z.detach(), *grads, *again]

    expected = gradients(loop)

    def compiled(*arguments):
        return gradfree.scan(*arguments, engine=engine, compile=True)

    assert off_by(gradients(compiled), expected) < 1e-10
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    assert off_by(gradients(compiled), expected) < 1e-10
    assert counters["unique_graphs"] == before


def test_an_output_that_depends_on_no_segment_is_compiled():
    weight, x = torch.randn(I, H, requires_grad=True), torch.randn(T, B, I)
    engine = gradfree.create_engine("shooting", segments=4, burn=8, max_sweeps=3, tolerance=1e-14)

    def step(h, x):
        h = torch.tanh(0.5 * h + x @ weight)
        return h, (h, weight)

    def gradient(run, **options):
        _, (y, weights) = run(step, torch.zeros(B, H), x, **options)
        return torch.autograd.grad(y.sin().sum() + weights.sin().sum(), weight)

    with gradfree.engine_figures() as figures:
        found = gradient(gradfree.scan, engine=engine, compile=True)
    assert off_by(found, gradient(loop)) < 1e-10
    assert [float(of["sequential"]) for of in figures.values()] == [0.0]


def test_a_function_with_a_rule_for_vmap_keeps_its_gradient_compiled():
    """torch 2.13 loses it in segments, in silence."""
    task = CompiledTask("spikes with a vmap rule")
    assert compare(task) < 1e-10
    assert task.was_cut


class Triangle(Spike):
    """Spikes with a surrogate gradient that is zero far from the threshold."""

    @staticmethod
    def backward(ctx, g):
        return g * (1 - ctx.saved_tensors[0].abs()).clamp(min=0)


@pytest.mark.filterwarnings("ignore:.*runs uncompiled in segments")
def test_surrogate_gradients_that_were_zero_in_the_first_call_are_right_later():
    """A comparison of gradients in the first call, where nothing spikes, sees nothing of them."""
    weight, gain = (torch.randn(size, requires_grad=True) for size in ((I, H), (H,)))
    x, value = torch.randn(56, B, I, requires_grad=True), gain.detach().clone()

    def step(h, x):
        h = 0.5 * h + (x @ weight) * gain + Triangle.apply(h + (x @ weight) * gain - 1)
        return h, h

    def gradients(run, **options):
        _, y = run(step, torch.zeros(B, H), x, **options)
        return torch.autograd.grad((y * torch.arange(H)).sum(), [weight, gain, x])

    for gain.data in (torch.zeros(H), value):
        found = gradients(gradfree.scan, engine=gradfree.create_engine("shooting", segments=7), compile=True)
        assert off_by(found, gradients(loop)) < 1e-10


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_step_that_changes_its_carry_in_place_runs_uncompiled_with_a_warning(mode):
    weight = torch.randn(I, H, requires_grad=True)

    def step(h, x):
        h *= 0.5
        h += x @ weight
        return h, h.clone()

    x = torch.randn(T, B, I)
    with mode():
        with pytest.warns(UserWarning, match="runs uncompiled: the step changes its carry or its x in place"):
            first = gradfree.scan(step, torch.zeros(B, H), x, engine="backprop", compile=True)
        second = gradfree.scan(step, torch.zeros(B, H), x, engine="backprop", compile=True)
        expected = loop(step, torch.zeros(B, H), x)
        assert off_by([*first, *second], [*expected, *expected]) < 1e-12


def test_a_compiled_scan_in_a_compiled_step_is_refused():
    def step(h, x):
        return gradfree.scan(lambda h, x: (h + x, h), h, x, engine="backprop", compile=True)

    with pytest.raises(ChainError, match=r"scan of .*step cannot be compiled as a whole"):
        gradfree.scan(step, torch.zeros(B, H), torch.randn(5, 5, B, H), engine="backprop", compile=True)


@pytest.mark.filterwarnings("ignore:.*runs uncompiled in segments")
def test_another_step_of_the_same_code_is_compared_too():
    """It has the shapes of the first one, which torch compiles rightly, and its parts are in a list."""
    read, x = nn.Linear(I, H), torch.randn(56, B, I, requires_grad=True)

    def gradients(run, operations, **options):
        def step(h, x):
            h = 0.5 * h + 0.4 * torch.tanh(read(x) + operations[0](h))
            return h, h

        return torch.autograd.grad(run(step, torch.zeros(B, H), x, **options)[1].sin().sum(), [x, *read.parameters()])

    for operation in (torch.sin, lambda h: Scale.apply(h, read.bias), torch.sin):
        engine = gradfree.create_engine("shooting", segments=7)
        found = gradients(gradfree.scan, [operation], engine=engine, compile=True)
        assert off_by(found, gradients(loop, [operation])) < 1e-10


@pytest.mark.parametrize("kind", ["attention over outside states", "a weight and a tensor made of it"])
def test_tensors_from_outside_keep_their_graph_in_the_compiled_loop(kind):
    assert compare(CompiledTask(kind, "backprop")) < 1e-10


def other_values(run):
    def wrong(step, carry, xs):
        after, ys = run(step, carry, xs)
        return [1.001 * t for t in after], ys

    return wrong


def no_numbers(run):
    def wrong(step, carry, xs):
        after, ys = run(step, carry, xs)
        return [t * torch.nan for t in after], ys

    return wrong


def other_gradients(run):
    return lambda step, carry, xs: run(step, [t.detach() for t in carry], xs)


def no_gradients(run):
    """What torch 2.13 makes of some steps that index."""

    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, e):
            raise UnboundLocalError("buf5")

    def wrong(step, carry, xs):
        after, ys = run(step, carry, xs)
        return [Raising.apply(t) for t in after], ys

    return wrong


def an_error(run):
    def wrong(step, carry, xs):
        raise RuntimeError("aoti_torch_cpu_mm_out API call failed")

    return wrong


@pytest.mark.parametrize(
    ("kind", "wrongly"),
    [
        ("complex state", an_error),
        ("topk, scattered", other_values),
        ("its initial state again", no_numbers),
        ("no batch dimension", other_gradients),
        ("Kalman filter", no_gradients),
    ],
)
@pytest.mark.parametrize("engine", [None, "backprop"])
def test_what_is_compiled_wrongly_runs_uncompiled_with_a_warning(kind, wrongly, engine, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda chunk, **options: wrongly(chunk))
    task = CompiledTask(kind, engine)
    assert compare(task) < 1e-10
    assert task.was_cut is (engine is None)
    assert any("runs uncompiled" in message for message in task.messages)


def test_both_passes_of_each_compiled_way_are_timed(monkeypatch):
    """Or compiled ways would compete by their forward passes only."""
    monkeypatch.setattr(torch, "compile", lambda chunk, **options: chunk)
    timed, note = {}, Contest.note

    def seen(contest, way, what, start, end):
        timed.setdefault(way, set()).add(what)
        note(contest, way, what, start, end)

    monkeypatch.setattr(Contest, "note", seen)
    read, x = nn.Linear(H, H), torch.randn(512, B, H)

    def step(h, x):
        h = torch.tanh(0.5 * read(h) + x)
        return h, h

    for _ in range(40):
        gradfree.scan(step, torch.zeros(B, H), x, compile=True)[1].sum().backward()
    assert Way(1, True) in timed
    assert all(passes == {"forward", "backward"} for passes in timed.values())


def test_a_cell_layer_is_compiled_without_an_engine():
    cell = nn.RNNCell(I, H)
    x = torch.randn(T, B, I)
    assert off_by([CellLayer(cell, compile=True)(x)[0]], [CellLayer(cell)(x)[0]]) < 1e-12


def test_a_hook_that_comes_later_runs_in_compiled_steps():
    read, x = nn.Linear(H, H), torch.randn(33, B, H)

    def step(h, x):
        h = torch.tanh(0.5 * read(h) + x)
        return h, h

    for _ in range(2):
        _, found = gradfree.scan(step, torch.zeros(B, H), x, engine="backprop", compile=True)
        assert off_by([found], [loop(step, torch.zeros(B, H), x)[1]]) < 1e-12
        read.register_forward_hook(lambda layer, given, out: 2 * out)


def test_what_is_only_compared_is_not_seen_by_hooks_and_retained_gradients():
    read, x = nn.Linear(H, H), torch.randn(16, B, H)

    def observed(run, **options):
        memory, seen = read(torch.ones(B, H)), []
        memory.retain_grad()
        memory.register_hook(lambda g: seen.append(g.clone()))

        def step(h, x):
            h = torch.tanh(0.5 * h + x + memory)
            return h, h

        y = run(step, torch.zeros(B, H), x, **options)[1]
        assert not seen
        assert memory.grad is None
        y.sum().backward()
        return [memory.grad, *seen]

    expected = observed(loop)
    assert off_by(observed(gradfree.scan, engine="backprop", compile=True), expected) < 1e-12
    assert len(expected) == 2


def test_under_autocast_results_are_compared_to_its_rounding(monkeypatch, recwarn):
    """And apart from those without autocast."""
    monkeypatch.setattr(torch, "compile", lambda chunk, **options: other_values(chunk))
    x = torch.randn(16, B, H, dtype=torch.float32)

    def step(h, x):
        h = torch.tanh(0.5 * h + x)
        return h, h

    def warned():
        gradfree.scan(step, torch.zeros(B, H, dtype=torch.float32), x, engine="backprop", compile=True)
        return any("runs uncompiled" in str(w.message) for w in recwarn)

    with torch.autocast("cpu", torch.bfloat16):
        assert not warned()
    assert warned()


def test_weights_that_are_cast_once_are_compared_under_autocast(recwarn):
    read, x = nn.Linear(H, H, dtype=torch.float32), torch.randn(16, B, H, dtype=torch.float32)

    def step(h, x):
        h = torch.tanh(read(h) + x)
        return h, h

    with torch.autocast("cpu", torch.bfloat16):
        gradfree.scan(step, torch.zeros(B, H, dtype=torch.float32), x, engine="backprop", compile=True)
    assert not [w for w in recwarn if "runs uncompiled" in str(w.message)]


def test_a_number_that_changes_too_often_is_named():
    x = torch.randn(17, B, H)

    def run(temperature):
        def step(h, x):
            h = torch.tanh(h + x) / temperature
            return h, h

        gradfree.scan(step, torch.zeros(B, H), x, engine="backprop", compile=True)

    with torch._dynamo.config.patch(recompile_limit=2):
        run(1.0)
        run(2.0)
        with pytest.raises(ChainError, match="Make such numbers tensors"):
            run(3.0)


def test_a_checkpoint_saves_the_same_in_both_runs():
    """What is done at the first use of a compiled chunk saves tensors, too."""
    read, x = nn.Linear(H, H), torch.randn(32, B, H, requires_grad=True)
    engine = gradfree.create_engine("shooting", segments=4, burn=8)

    def step(h, x):
        h = torch.tanh(0.5 * read(h) + x)
        return h, h

    def gradients(run):
        return torch.autograd.grad(run(step, torch.zeros(B, H), x)[1].sin().sum(), [x, *read.parameters()])

    def checkpointed(*arguments):
        return checkpoint(lambda: gradfree.scan(*arguments, engine=engine, compile=True), use_reentrant=False)

    assert off_by(gradients(checkpointed), gradients(loop)) < 1e-10


def test_a_step_that_hooks_its_carry_is_refused():
    """In torch 2.13 the hook gets another gradient than in the loop."""
    read = nn.Linear(H, H)

    def step(h, x):
        if h.requires_grad:
            h.register_hook(lambda g: 0.5 * g)
        h = torch.tanh(read(h) + x)
        return h, h

    with pytest.raises(ChainError, match="registers hooks on its carry"):
        gradfree.scan(step, torch.zeros(B, H), torch.randn(9, B, H), engine="backprop", compile=True)


def test_a_step_with_a_graph_break_is_refused():
    def step(h, x):
        print("a break")
        return h + x, h

    with pytest.raises(ChainError, match="cannot be compiled as a whole"):
        gradfree.scan(step, torch.zeros(3), torch.randn(20, 3), engine="backprop", compile=True)
