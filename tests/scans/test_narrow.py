"""``engine="newton"`` on narrow carries against the loop: states and gradients of random steps, fallbacks, memory."""

import warnings

import pytest
import torch
from narrow_steps import NarrowStep
from oracles import off_by
from scan_tasks import counted, loop
from torch import nn
from torch.utils._pytree import tree_leaves

import gradfree
from gradfree import CellLayer
from gradfree.scans.newton import relative_so_far

ENGINE = gradfree.create_engine("newton", max_sweeps=30)


def by_newton(*arguments, **options):
    return gradfree.scan(*arguments, engine=ENGINE, **options)


def gradients(program, scan):
    """Return the outputs, whether they need a gradient, and all gradients."""
    outputs = [t for t in tree_leaves(program.run(scan)) if t is not None]
    final = 1 + (program.form in ("parts", "dict"))
    chosen = outputs[:final] if program.losses == "final" else outputs
    if program.losses == "one step":
        chosen = [t[len(t) // 2] if t.dim() and len(t) else t for t in outputs]
    live = [t.abs() if t.is_complex() else t for t in chosen if t.requires_grad]
    # Scaled: the sine of a large number has no digits.
    live = [t / (1 + t.detach().abs().max()) for t in live if t.numel()]
    loss = sum((t.sin() * (1 + n)).sum() for n, t in enumerate(live))
    grads = torch.autograd.grad(loss, program.trained, allow_unused=True) if live else []
    return [t.detach() for t in outputs], [t.requires_grad for t in outputs], grads


def check(seed, within):
    """Compare a program with the loop; return whether all steps ran at once in both passes."""
    expected, needed, expected_grads = gradients(NarrowStep(seed), loop)
    with warnings.catch_warnings(), gradfree.engine_figures() as figures:
        warnings.simplefilter("ignore")
        actual, now_needed, grads = gradients(NarrowStep(seed), by_newton)
    assert now_needed == needed, seed
    for now, own in zip((*actual, *grads), (*expected, *expected_grads), strict=True):
        if now is None or own is None:
            # Where the loop gives no gradient, zeros are right, too.
            assert all(g is None or not g.any() for g in (now, own)), seed
        elif own.numel():
            assert (now - own).abs().max() <= within * max(own.abs().max(), 1e-3), seed
    return all(of["sequential"] == 0 and of["forward sequential"] == 0 for of in figures.values()) and bool(figures)


def test_random_narrow_steps_equal_the_loop():
    assert sum(check(seed, 1e-10) for seed in range(40)) > 25


@pytest.mark.slow
def test_many_random_narrow_steps_equal_the_loop(request):
    count = request.config.getoption("--programs")
    at_once = sum(check(seed, 1e-9) for seed in range(1000, 1000 + count))
    print(f"{at_once} of {count} random narrow steps ran at once")


def van_der_pol(s, x):
    p, v = s[..., :1], s[..., 1:]
    s = torch.cat([p + 0.02 * v, v + 0.02 * (1.5 * (1 - p * p) * v - p + x)], -1)
    return s, s


def logistic(s, x):
    s = 3.9 * s * (1 - s) + 0 * x
    return s, s


def growing(s, x):
    s = 1.02 * s + x * torch.tanh(s)
    return s, s


@pytest.mark.parametrize("step", [van_der_pol, logistic])
def test_steps_that_do_not_converge_are_the_loop_after_few_sweeps_and_are_remembered(step):
    x = torch.randn(1500, 2, 1) * 0.3
    start = torch.full((2, 2 if step is van_der_pol else 1), 0.3, requires_grad=True)
    expected = loop(step, start, x)[1]
    run, calls = counted(step)
    out = gradfree.scan(run, start, x, engine="newton")[1]
    assert torch.equal(out, expected)
    with pytest.warns(UserWarning, match="does not converge by Newton's method"):
        out.sum().backward()
    # A sweep is one call.
    assert calls.count < 1.1 * 1500
    calls.count = 0
    assert torch.equal(gradfree.scan(run, start, x, engine="newton")[1], expected)
    assert calls.count == 1500


def test_growing_states_are_right_at_their_small_beginnings():
    x, start = 0.01 * torch.randn(600, 1, 1), torch.ones(1, 1)
    expected = loop(growing, start, x)[1]
    out = by_newton(growing, start, x)[1]
    assert ((out - expected) / expected).abs().max() < 1e-10


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_parts_of_two_dtypes_run_at_once(dtypes):
    def step(s, x):
        a, b = s
        a, b = (0.5 * torch.tanh(a + x + 0.1 * b)).to(a.dtype), (0.9 * b + 0.1 * a).to(b.dtype)
        return (a, b), a + b

    x = torch.randn(300, 16, requires_grad=True)
    start = tuple(torch.zeros(16, dtype=dtype) for dtype in dtypes)
    with gradfree.engine_figures() as figures:
        found = torch.autograd.grad(by_newton(step, start, x)[1].sin().sum(), x)
    assert off_by(found, torch.autograd.grad(loop(step, start, x)[1].sin().sum(), x)) < 1e-5
    assert [of["sequential"] for of in figures.values()] == [0]


def test_a_carry_may_lie_in_memory_in_another_order():
    """As the results of ``torch.linalg`` do."""

    def step(s, x):
        s = torch.linalg.inv(torch.eye(2) + 0.1 * torch.tanh(s + x))
        return s, s

    x = torch.randn(300, 2, 2, requires_grad=True)
    with gradfree.engine_figures() as figures:
        found = torch.autograd.grad(by_newton(step, torch.eye(2), x)[1].sin().sum(), x)
    assert off_by(found, torch.autograd.grad(loop(step, torch.eye(2), x)[1].sin().sum(), x)) < 1e-10
    assert [of["sequential"] for of in figures.values()] == [0]


def forgetting(s, x):
    """Its small jumps are carried on for a thousand steps."""
    s = 0.999 * s + 0.001 * torch.tanh(x - 0.3 * s)
    return s, s


def test_long_memory_is_as_exact_as_the_tolerance():
    x, start = 1 + torch.randn(4000, 2, 1), torch.zeros(2, 1)
    engine = gradfree.create_engine("newton", max_sweeps=30, tolerance=1e-4)
    assert off_by([gradfree.scan(forgetting, start, x, engine=engine)[1]], [loop(forgetting, start, x)[1]]) < 1e-4


@pytest.mark.parametrize(("shape", "at_once"), [((2, 4), True), ((5, 4), False)])
def test_rows_that_depend_on_each_other_are_one_row_if_it_is_narrow(shape, at_once):
    def step(s, x):
        s = 0.9 * s + 0.1 * torch.tanh(x + s.mean(0, keepdim=True))
        return s, s

    step.__code__ = step.__code__.replace(co_name=f"step_{shape[0]}")
    x = torch.randn(50, *shape, requires_grad=True)
    expected = torch.autograd.grad(loop(step, torch.zeros(shape), x)[1].sin().sum(), x)
    with warnings.catch_warnings(record=True) as caught, gradfree.engine_figures() as figures:
        warnings.simplefilter("always")
        found = torch.autograd.grad(by_newton(step, torch.zeros(shape), x)[1].sin().sum(), x)
    assert off_by(found, expected) < 1e-10
    assert bool(figures) == at_once
    assert any("more than 8 numbers that depend on each other" in str(w.message) for w in caught) != at_once


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_runs_at_once_too(mode):
    x = torch.randn(600, 2, 1)
    run, calls = counted(forgetting)
    expected = loop(forgetting, torch.zeros(2, 1), x)[1]
    with mode():
        out = by_newton(run, torch.zeros(2, 1), x + 0)[1]
    assert not out.requires_grad
    assert off_by([out], [expected]) < 1e-10
    assert calls.count < 20


class Filter(nn.Module):
    """A resonant filter."""

    hidden_size = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.05, 0.4]))

    def forward(self, x, s):
        low, band = s.unbind(-1)
        frequency, damping = self.weight
        band = band + frequency * (x[..., 0] - low - damping * torch.tanh(band))
        return torch.stack([low + frequency * band, band], -1)


def test_a_cell_layer_equals_its_loop():
    layer, x = CellLayer(Filter()), torch.randn(300, 3, 1, requires_grad=True)

    def run():
        out, state = layer(x)
        loss = (out.sin().sum() + state.square().sum(),)
        return [out.detach(), *torch.autograd.grad(loss, [x, *layer.parameters()])]

    expected = run()
    with ENGINE.attach(layer), gradfree.engine_figures() as figures:
        assert off_by(run(), expected) < 1e-10
    assert [of["sequential"] for of in figures.values()] == [0]


def test_auto_keeps_the_fastest_way():
    x, start = torch.randn(1000, 1, 1), torch.zeros(1, 1)
    run, calls = counted(forgetting)
    for _ in range(8):
        gradfree.scan(run, start, x, engine="auto")
    calls.count = 0
    out = gradfree.scan(run, start, x, engine="auto")[1]
    assert calls.count < 40
    assert off_by([out], [loop(forgetting, start, x)[1]]) < 1e-10


def test_auto_does_not_warn_of_wide_carries():
    cell = nn.GRUCell(3, 16)

    def step(h, x):
        h = cell(x, h)
        return h, h

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            gradfree.scan(step, torch.zeros(1, 16), torch.randn(4000, 1, 3), engine="auto")


def test_errors_are_relative_to_the_states_so_far():
    change, states = [torch.tensor([1e-3, 0.0])], [torch.tensor([1e-3, 1e6])]
    assert relative_so_far(change, states) == 0.5
    assert relative_so_far(change, states, reverse=True) < 1e-8


def test_a_signal_of_large_numbers_settles_in_single_precision():
    """Numbers near zero have the rounding errors of the others: only a mask is measured by itself."""
    x = (3e4 * torch.randn(2048, 2, 1, dtype=torch.float32)).requires_grad_()

    def step(c, x):
        c = 0.95 * c + x
        return c, c

    for engine, options in (("newton", {"max_sweeps": 50}), ("shooting", {"segments": 16, "max_sweeps": 5})):
        with gradfree.engine_figures() as figures:
            _, y = gradfree.scan(step, 0 * x[0].detach(), x, engine=gradfree.create_engine(engine, **options))
            y.sum().backward()
        assert [float(of["forward sequential"]) for of in figures.values()] == [0.0]
