"""``scan`` in segments against the loop: outputs, final carries and all gradients in float64."""

from math import inf, nan

import pytest
import torch
from oracles import off_by
from scan_tasks import KINDS, CutTask, compare, counted, loop

import gradfree


@pytest.mark.parametrize("kind", [kind for kind, (_, cut) in KINDS.items() if cut])
@pytest.mark.parametrize("length", [61, 64])
def test_steps_that_run_in_segments_equal_the_loop(kind, length):
    task = CutTask(kind, length)
    assert compare(task) < 1e-10
    assert task.was_cut, task.messages


@pytest.mark.parametrize("kind", [kind for kind, (_, cut) in KINDS.items() if not cut])
def test_steps_that_cannot_run_in_segments_are_the_loop_with_a_warning(kind):
    """With the second call at the latest: the first one may have filled a cache."""
    tasks = [CutTask(kind, 40), CutTask(kind, 40)]
    assert [compare(task) for task in tasks] == [0.0, 0.0]
    assert not any(task.was_cut for task in tasks)
    assert any("runs step by step: the step" in message for task in tasks for message in task.messages)


@pytest.mark.parametrize(
    ("beside", "tolerance"),
    [
        (lambda: torch.zeros(2, 64, dtype=torch.bool), 1e-12),
        (lambda: torch.zeros(2, 64, dtype=torch.complex128), 1e-12),
        (lambda: torch.zeros(2, 3, dtype=torch.float32), 1e-5),
    ],
)
def test_the_tolerance_is_that_of_the_coarsest_floating_dtype_whatever_is_the_largest_part(beside, tolerance):
    torch.set_default_dtype(torch.float32)
    x, start = torch.randn(64, 2, 5, dtype=torch.float64, requires_grad=True), torch.zeros(2, 5, dtype=torch.float64)

    def step(carry, x):
        h = torch.tanh(0.5 * carry[0] + x)
        return (h, carry[1].clone()), h

    with gradfree.engine_figures() as figures:
        engine = gradfree.create_engine("shooting", segments=8, burn=16)
        gradfree.scan(step, (start, beside()), x, engine=engine)[1].square().sum().backward()
    ((name, found),) = figures.items()
    assert {key: float(found[key]) for key in ("tolerance", "forward tolerance")} == pytest.approx(
        {"tolerance": tolerance, "forward tolerance": tolerance}
    ), name


def test_small_numbers_that_grow_are_right_before_a_large_one():
    """Borders are compared with the numbers so far: the largest one of all comes late here."""
    factor, x = torch.tensor([1.02], requires_grad=True), 1e-3 * torch.randn(1024, 1)
    x[-5] = 1e8

    def step(h, x):
        h = factor * h + x
        return h, h

    found = []
    for engine in ("backprop", gradfree.create_engine("shooting", segments=8)):
        with gradfree.engine_figures() as figures:
            h, _ = gradfree.scan(step, torch.ones(1), x, engine=engine)
            found.append((h.detach(), *torch.autograd.grad(h.sum(), factor)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=0.0)
    assert figures


NEVER = -1e30
"""The logarithm of a probability of zero, for a mask."""


def hidden_states(count, length):
    """The log-probabilities of jumps between hidden states in a line, of their start, and of observations."""
    jumps, start = torch.full((count, count), NEVER), torch.full((2, count), NEVER)
    for n in range(count):
        jumps[n, n : n + 2] = torch.randn(len(jumps[n, n : n + 2]))
    start[:, 0] = 0.0
    return jumps, start, torch.randn(length, 2, count, requires_grad=True)


def close_to_the_loop(engine, step, start, x):
    found = []
    for run in (loop, lambda *given: gradfree.scan(*given, engine=engine)):
        last, y = run(step, start, x)
        found.append([last, y, *torch.autograd.grad(last.logsumexp(-1).sum() + y.sin().sum(), x)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*has long memory")
def test_in_segments_a_mask_says_nothing_about_the_numbers_beside_it():
    jumps, start, x = hidden_states(20, 256)
    jumps[-1, 0] = 0.0

    def step(a, x):
        a = torch.logsumexp(a.unsqueeze(-1) + jumps, -2) + x
        total = torch.logsumexp(a, -1, keepdim=True)
        return a - total, total

    close_to_the_loop(gradfree.create_engine("shooting", segments=32), step, start, x)


@pytest.mark.filterwarnings("ignore:.*does not converge")
def test_by_newtons_method_a_mask_says_nothing_about_the_numbers_beside_it():
    jumps, start, x = hidden_states(7, 200)

    def step(a, x):
        a = torch.logsumexp(a.unsqueeze(-1) + jumps, -2) + x
        return a, a[:, 0]

    close_to_the_loop(gradfree.create_engine("newton", max_sweeps=200), step, start, x)


SPREAD = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def unit_vector(h, x):
    h = torch.tanh(h @ SPREAD) * x.exp()
    h = h / h.norm()
    return h, h


def probabilities(p, x):
    p = p @ SPREAD.softmax(-1) * x.exp()
    return p / p.sum(), p.sum().log()


def information(p, x):
    p = torch.linalg.inv(p) * 0.9 + 0.1 * x.exp().diag()
    return torch.linalg.inv(p), p


@pytest.mark.parametrize(
    ("step", "start"),
    [(unit_vector, torch.ones(4)), (probabilities, torch.ones(4) / 4), (information, torch.eye(4))],
)
def test_steps_that_are_not_defined_at_zero_run_in_segments(step, start, recwarn):
    x, start = torch.randn(600, 4, requires_grad=True), start.double().requires_grad_()
    engine = gradfree.create_engine("shooting", segments=8)

    def run(scan, **options):
        carry, y = scan(step, start, x, **options)
        return [y.detach(), *torch.autograd.grad(carry.sin().sum() + y.sin().sum(), (start, x))]

    with gradfree.engine_figures() as figures:
        found = run(gradfree.scan, engine=engine)
    assert off_by(found, run(loop)) < 1e-10
    assert [of["sequential"] for of in figures.values()] == [0]
    assert not recwarn


@pytest.mark.parametrize("mask", [-inf, -1e9, nan])
def test_what_the_start_rules_out_is_not_ruled_out_in_segments(mask):
    """Units are off until an input, the tenth, puts them on, which no burn-in sees."""
    x, start = torch.randn(800, 3), torch.full((3,), mask)
    x[9] = 20.0

    def step(a, x):
        a = torch.where(~(a >= -1e4) & (x < 20), a, x)
        return a, a

    _, expected = loop(step, start, x)
    run, calls = counted(step)
    with torch.no_grad():
        _, found = gradfree.scan(run, start, x, engine=gradfree.create_engine("shooting", segments=4, burn=60))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    # The first step, the burn-in, and all segments once.
    assert calls.count == 1 + 60 + 200


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_gradients_are_exact_to_the_tolerance_however_little_the_outputs_depend_on_the_carry(scale):
    """Their cotangents, as large as the carry, are no measure of the carry's cotangents."""
    torch.set_default_dtype(torch.float32)
    weight, x, e = (torch.randn(8, 8) / 10).requires_grad_(), torch.randn(1000, 2, 8), torch.randn(1000, 2, 8)

    def step(h, x):
        h = 0.9 * h + 0.1 * torch.tanh(x + h @ weight)
        return h, scale * h

    found = []
    for engine in ("backprop", gradfree.create_engine("shooting", segments=8, burn=16)):
        with gradfree.engine_figures() as figures:
            _, y = gradfree.scan(step, torch.zeros(2, 8), x, engine=engine)
            found.append(torch.autograd.grad(y, weight, e)[0])
    assert [float(of["sequential"]) for of in figures.values()] == [0.0]
    assert (found[1] - found[0]).abs().max() < 1e-5 * found[0].abs().max()


def test_a_part_of_the_carry_may_have_no_numbers(recwarn):
    x, empty = torch.randn(64, 2, 5, requires_grad=True), torch.zeros(2, 0, requires_grad=True)

    def step(carry, x):
        h = torch.tanh(0.5 * carry[0] + x)
        return (h, carry[1] * h[:, :0]), h

    def gradients(run, **options):
        (h, last), y = run(step, (torch.zeros(2, 5), empty), x, **options)
        of_x, of_empty = torch.autograd.grad(h.sum() + last.sum() + y.square().sum(), [x, empty])
        assert of_empty.shape == empty.shape
        return [of_x]

    found = gradients(gradfree.scan, engine=gradfree.create_engine("shooting", segments=8, tolerance=1e-14))
    assert off_by(found, gradients(loop)) < 1e-10
    assert not recwarn


class Flat(torch.autograd.Function):
    """Has a wrong rule for vmap: its outputs have another shape than in a loop."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, dims, x):
        return x.flatten(1), 0


def test_results_of_another_shape_than_in_the_loop_run_step_by_step():
    def step(h, x):
        h = torch.tanh(0.5 * h + x)
        return h, Flat.apply(h)

    start, x = torch.zeros(2, 5), torch.randn(64, 2, 5)
    with pytest.warns(UserWarning, match="gives results of other shapes where it runs at once with other steps"):
        found = gradfree.scan(step, start, x, engine=gradfree.create_engine("shooting", segments=8))[1]
    assert torch.equal(found, loop(step, start, x)[1])
