"""Carries in containers that steps write to, and in conjugated form; a scan in the step of a scan."""

import warnings
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from oracles import off_by
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node

import gradfree
from gradfree.loops.recurrence import Structure

WAYS = [
    gradfree.create_engine("backprop"),
    gradfree.create_engine("shooting", segments=4),
    gradfree.create_engine("newton", max_sweeps=30),
    "shooting",
    "auto",
]


def in_dict(state, h):
    state["h"] = h
    return state


def in_list(state, h):
    state[0] = h
    return state


def in_nested(state, h):
    state[0]["h"] = h
    return state


COMPILED = pytest.param("compiled", marks=pytest.mark.slow)


@pytest.mark.parametrize("engine", [*WAYS, COMPILED], ids=str)
@pytest.mark.parametrize(
    ("make", "write", "read"),
    [
        (lambda h: {"h": h}, in_dict, lambda state: state["h"]),
        (lambda h: [h], in_list, lambda state: state[0]),
        (lambda h: ({"h": h}, None), in_nested, lambda state: state[0]["h"]),
    ],
    ids=["dict", "list", "nested"],
)
def test_a_step_may_write_to_its_carry_and_return_it_as_carry_and_y(make, write, read, engine):
    """Each step's y is what it was after the step, and the container of ``init`` stays as it was, in every call."""
    weight, x, start = torch.randn(3, 3, requires_grad=True), torch.randn(160, 2, 3), torch.zeros(2, 3)
    init = make(start)

    def new(h, x):
        return torch.tanh(0.5 * h @ weight + x)

    def step(state, x):
        state = write(state, new(read(state), x))
        return state, state

    expected = [new(start, x[0])]
    for each in x[1:]:
        expected.append(new(expected[-1], each))
    wanted = torch.autograd.grad(torch.stack(expected).square().sum(), weight)
    options = {"engine": "backprop", "compile": True} if engine == "compiled" else {"engine": engine}
    for _ in range(4):
        carry, y = gradfree.scan(step, init, x, **options)
        assert read(init) is start
        assert off_by([read(carry), read(y)], [expected[-1], torch.stack(expected)]) < 1e-10
        assert off_by(torch.autograd.grad(read(y).square().sum(), weight), wanted) < 1e-10


@pytest.mark.parametrize("returned", ["as it is", "conjugated"])
def test_conjugated_carries_run_in_segments(returned):
    """A loss through ``conj()`` gives a cotangent with the conjugate bit."""
    weight = (0.3 * torch.randn(3, 3, dtype=torch.complex128)).requires_grad_()
    x, start = torch.randn(256, 2, 3, dtype=torch.complex128), torch.zeros(2, 3, dtype=torch.complex128)

    def step(h, x):
        h = h @ weight + x
        h = h / (1 + h.abs())
        return h if returned == "as it is" else h.conj(), h

    def gradient(engine):
        carry, y = gradfree.scan(step, start, x, engine=engine)
        return torch.autograd.grad((carry.conj() * x[0]).real.sum() + y.abs().square().sum(), weight)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradient(gradfree.create_engine("shooting", segments=4))
    assert off_by(found, gradient("backprop")) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["shooting", "newton"])
def test_a_scan_in_a_step_may_be_compiled(engine, recwarn):
    """While the outer scan watches its first step, nothing is compiled."""
    weight, x = (0.4 * torch.randn(2, 2)).requires_grad_(), torch.randn(128, 9, 2, 2)

    def inner(h, x):
        h = torch.tanh(h @ weight + x)
        return h, h

    def gradient(engine, **inside):
        def outer(h, x):
            h, y = gradfree.scan(inner, 0.5 * h, x, engine="backprop", **inside)
            return h, y.sum(0)

        carry, y = gradfree.scan(outer, torch.zeros(2, 2), x, engine=engine)
        return torch.autograd.grad(y.square().sum() + carry.sum(), weight)

    assert off_by(gradient(engine, compile=True), gradient("backprop")) < 1e-10
    assert not [w for w in recwarn if "scan of" in str(w.message)]


class Pair(NamedTuple):
    h: Any
    c: Any


NESTED = {
    "a pair": lambda c, x: ((c, x), c),
    "three times": lambda c, x: ((c, c, c), x),
    "twice in a tuple": lambda c, x: ((c, c), c),
    "twice in a named tuple": lambda c, x: (Pair(c, c), c),
    "twice in an ordered dict": lambda c, x: (OrderedDict(a=c, b=c), c),
}


@pytest.mark.parametrize("engine", ["backprop", "shooting"])
@pytest.mark.parametrize(
    ("init", "message"),
    [(lambda h: h, "but init is one tensor"), (lambda h: (h,), "nested more than 8 deep")],
    ids=["tensor", "tuple"],
)
@pytest.mark.parametrize("step", NESTED.values(), ids=NESTED)
def test_a_carry_that_is_nested_by_mistake_is_refused_at_once(step, init, message, engine):
    with pytest.raises(TypeError, match=message):
        gradfree.scan(step, init(torch.zeros(2)), torch.randn(600, 2), engine=engine)


def rotating(c, x):
    for key in c:
        c[key] = c[key] + (1.0 if key == "a" else 100.0) + 0.0 * x
    c.move_to_end(next(iter(c)))
    return c, c


OTHER_Y = {
    "keys in another order": (rotating, lambda h: OrderedDict(a=h, b=h)),
    "other keys": (lambda c, x: (c + 1, {"a" if float(c[0]) else "b": x}), lambda h: h),
    "none at first": (lambda c, x: ((x, c[0]), (x, None if c[1] is None else c[1] - x)), lambda h: (h, None)),
    "none later": (lambda c, x: (c + 1, None if float(c[0]) else x), lambda h: h),
    "a number later": (lambda c, x: (c + 1, 1.0 if float(c[0]) else x), lambda h: h),
}


@pytest.mark.parametrize("length", [5, 160])
@pytest.mark.parametrize(("step", "init"), OTHER_Y.values(), ids=OTHER_Y)
@pytest.mark.filterwarnings("ignore")
def test_outputs_of_another_structure_at_some_steps_are_refused(step, init, length):
    with pytest.raises(TypeError, match=r"a y of another structure at some steps|returns float in y"):
        gradfree.scan(step, init(torch.zeros(2)), torch.randn(length, 2))


def test_a_tensor_in_place_of_none_has_another_structure():
    structure, parts = Structure.of(None)
    assert parts == structure.tensors(None, "scan") == []
    with pytest.raises(TypeError, match="scan returns a carry or a y of another structure"):
        structure.tensors(torch.zeros(2), "scan")


class Frozen(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")


class Two(tuple):
    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


CONTAINERS = {
    "a dict that cannot change": (Frozen, lambda t: ([*t.values()], [*t]), lambda ts, _: Frozen(a=ts[0], b=ts[1])),
    "a tuple with a constructor": (Two, lambda t: ([*t], None), lambda ts, _: Two(*ts)),
}


@pytest.mark.parametrize(("kind", "flatten", "build"), CONTAINERS.values(), ids=CONTAINERS)
def test_containers_that_are_registered_are_made_as_they_say(kind, flatten, build):
    if kind not in SUPPORTED_NODES:
        register_pytree_node(kind, flatten, build)
    h, x = torch.zeros(2), torch.randn(140, 2)
    init = Frozen(a=h, b=h) if kind is Frozen else Two(h, h)

    def step(carry, x):
        a, b = flatten(carry)[0]
        after = build([torch.tanh(0.5 * b + x), a], ["a", "b"])
        return after, after

    found = [gradfree.scan(step, init, x, engine=engine)[1] for engine in ("backprop", WAYS[1])]
    assert [type(y) for y in found] == [kind, kind]
    assert off_by(*(flatten(y)[0] for y in found)) < 1e-10


@pytest.mark.parametrize("engine", [*WAYS, COMPILED], ids=str)
def test_a_container_at_two_places_of_a_carry_is_two(engine):
    """As in segments, which only keep the tensors: a step that writes to one place does not write to the other."""
    weight, x = torch.randn(3, 3, requires_grad=True), torch.randn(160, 2, 3)
    options = {"engine": "backprop", "compile": True} if engine == "compiled" else {"engine": engine}

    def step(carry, x):
        for n, part in enumerate(carry):
            part["h"] = torch.tanh(0.5 * part["h"] @ weight + (1 + n) * x)
        return [carry[1], carry[1]], carry[0]["h"]

    expected, parts = [], [torch.zeros(2, 3)] * 2
    for each in x:
        parts = [torch.tanh(0.5 * h @ weight + (1 + n) * each) for n, h in enumerate(parts)]
        expected.append(parts[0])
        parts = [parts[1], parts[1]]
    for _ in range(4):
        y = gradfree.scan(step, [{"h": torch.zeros(2, 3)}] * 2, x, **options)[1]
        assert off_by([y], [torch.stack(expected)]) < 1e-10


@pytest.mark.parametrize("engine", ["backprop", "shooting"])
@pytest.mark.filterwarnings("ignore:.*runs step by step")
def test_a_container_that_the_step_keeps_may_be_its_y(engine):
    kept, x = {}, torch.randn(160, 2, 3)

    def step(h, x):
        kept["h"] = torch.tanh(0.5 * h + x)
        return kept["h"], kept

    for _ in range(4):
        carry, y = gradfree.scan(step, torch.zeros(2, 3), x, engine=engine)
        assert torch.equal(y["h"][-1], carry)
        assert not torch.equal(y["h"][0], y["h"][1])
        assert torch.equal(y["h"][0], torch.tanh(x[0]))


@pytest.mark.slow
def test_a_step_without_a_carry_may_be_compiled():
    weight, x = torch.randn(3, 3, requires_grad=True), torch.randn(20, 2, 3)
    carry, y = gradfree.scan(lambda _, x: (None, torch.tanh(x @ weight)), None, x, engine="backprop", compile=True)
    assert carry is None
    assert off_by([y], [torch.tanh(x @ weight)]) < 1e-12


def test_a_carry_that_has_no_tensors_runs_step_by_step_with_a_warning():
    x = torch.randn(200, 3)
    with pytest.warns(UserWarning, match="has a carry with entries that are neither tensors nor None"):
        count, y = gradfree.scan(lambda n, x: (n + 1, n * x), 0, x)
    assert count == 200
    assert torch.equal(y, torch.arange(200.0)[:, None] * x)
