"""Step functions that cannot run in segments; each makes parameters and a step from the cell that it is given."""

import itertools
import random
import weakref
from contextvars import ContextVar
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def dropout(params, cell, x):
    return params, lambda h, x: F.dropout(cell(h, x), 0.1)


def python_random(params, cell, x):
    return params, lambda h, x: cell(h, x) * random.random()


def numpy_pairs(params, cell, x):
    """NumPy draws two normal numbers at once, and keeps one."""
    np.random.seed(0)  # noqa: NPY002
    draw = np.random.randn
    draw()
    return params, lambda h, x: cell(h, x) * draw()


def selects_and_scatters(params, cell, x):
    return params, lambda h, x: cell(torch.select_scatter(h, h[:, 0], 1, 2), x)


def fills_by_index(params, cell, x):
    zeros, first = x.new_zeros(params[0].shape[0] // 3), torch.tensor([0])
    return params, lambda h, x: cell(h + zeros.index_fill(0, first, h.mean()), x)


def reads_by_strides(params, cell, x):
    matrix = torch.eye(x.shape[1]).roll(1, 0)
    return params, lambda h, x: cell(h + (matrix @ h).as_strided(h.shape, (h.shape[1], 1)), x)


def rolls_a_number(params, cell, x):
    return params, lambda h, x: cell(h + h.mean().roll(1), x)


def any_along_no_dimension(params, cell, x):
    return params, lambda h, x: cell(torch.where((h > 0.1).any(dim=()) & (h < 0.5).all(dim=[]), -h, h), x)


def reads_a_changing_table_with_padding(params, cell, x):
    return params, lambda h, x: cell(h + F.embedding((x[:, 0] > 0).long(), h, padding_idx=-1).sum(0), x)


def branch(params, cell, x):
    return params, lambda h, x: cell(h, x if x.sum() > 0 else -x)


def appends(params, cell, x):
    taps = []

    def step(h, x):
        taps.append(h)
        return cell(h, x)

    return params, step


def counts(params, cell, x):
    calls = 0

    def step(h, x):
        nonlocal calls
        calls += 1
        return cell(h, x) / calls

    return params, step


def buffer_in_place(params, cell, x):
    steps = torch.zeros(())

    def step(h, x):
        steps.add_(1)
        return cell(h, x) / steps.clone()

    return params, step


def overwrites_its_carry(params, cell, x):
    return params, lambda h, x: cell(h.mul_(0.9), x) if not h.requires_grad else cell(h * 0.9, x)


def hook_on_carry(params, cell, x):

    def step(h, x):
        if h.requires_grad:
            h.register_hook(lambda g: 0.5 * g)
        return cell(h, x)

    return params, step, torch.zeros(x.shape[1], params[0].shape[0] // 3, requires_grad=True), x


def hook_from_the_second_step_on(params, cell, x):

    def step(h, x):
        if h.requires_grad:
            h.register_hook(lambda g: 0.5 * g)
        return cell(h, x)

    return params, step


def asks_for_a_graph(params, cell, x):

    def step(h, x):
        h = cell(h, x)
        return h if h.grad_fn is None else 0.9 * h

    return params, step


def checkpointed(params, cell, x):
    return params, lambda h, x: checkpoint(cell, h, x, use_reentrant=False)


def narrow_start(params, cell, x):
    return params, lambda h, x: cell(h.expand(x.shape[1], -1), x), torch.zeros(1, params[0].shape[0] // 3), x


def wider_numbers(params, cell, x):
    """Of the carry's dtype in the loop: numbers, tensors without dimensions, do not count."""
    rate, steps = torch.rand(4, dtype=torch.float32, requires_grad=True), torch.rand(len(x), dtype=torch.float64)

    def step(h, x):
        x, dt = x
        return torch.addcmul(h, torch.tanh(rate * x[:, :1] - h), dt)

    return [rate], step, torch.zeros(x.shape[1], 4, dtype=torch.float32), (x.to(torch.float32), steps)


def counting(counter):
    """Return a kind of steps that use the number of their calls, which ``counter()`` counts."""

    def kind(params, cell, x):
        count = counter()
        return params, lambda h, x: cell(h, x) / count()

    return kind


def in_an_attribute():
    def count():
        count.calls += 1
        return count.calls

    count.calls = 0
    return count


def in_a_default():
    def count(first=0, calls=[0]):  # noqa: B006
        calls[0] += 1
        return first + calls[0]

    count.__defaults__ = 0, [0]
    return count


def in_a_keyword_default():
    def count(*, calls=[0]):  # noqa: B006
        calls[0] += 1
        return calls[0]

    count.__kwdefaults__ = {"calls": [0]}
    return count


class Calls:
    number = 0

    def __call__(self):
        type(self).number += 1
        return self.number


def in_a_class():
    Calls.number = 0
    return Calls()


def in_a_module():
    counters = ModuleType("counters")
    counters.calls = 0

    def count():
        counters.calls += 1
        return counters.calls

    return count


def in_a_module_of_a_module():
    package = ModuleType("package")
    package.counters = ModuleType("counters")
    package.counters.calls, package.counters.package = 0, package

    def count():
        package.counters.calls += 1
        return package.counters.calls

    return count


def in_a_list_known_by_its_method():
    append = [].append

    def count():
        append(0)
        return len(append.__self__)

    return count


def in_an_attribute_of_a_tensor():
    one = torch.ones(())
    one.calls = 0

    def count():
        one.calls += 1
        return one * one.calls

    return count


def in_a_context_variable():
    calls = ContextVar("calls", default=0)

    def count():
        calls.set(calls.get() + 1)
        return calls.get()

    return count


def in_an_inner_function():
    global calls
    calls = 0

    def count():
        def one_more():
            global calls
            calls += 1
            return calls

        return one_more()

    return count


class Global:
    def __call__(self):
        global calls
        calls += 1
        return calls


def in_a_global_of_an_object():
    global calls
    calls = 0
    return Global()


def in_an_iterator():
    numbers = itertools.count(1)
    return lambda: next(numbers)


def in_a_generator():
    numbers = (n for n in range(1, 1000))
    return lambda: next(numbers)


def in_new_data():
    steps = torch.zeros(())

    def count():
        steps.data = steps + 1
        return steps.clone()

    return count


def in_an_array():
    steps = np.zeros(2)

    def count():
        steps[1] += 1
        return steps[1]

    return count


class Owner:
    number = 0


OWNERS = []
"""Of weak references, which no step finds here."""


def in_an_object_known_by_a_weak_reference():
    OWNERS.append(Owner())
    owner = weakref.ref(OWNERS[-1])

    def count():
        owner().number += 1
        return owner().number

    return count


def in_one_of_two_of_a_name():
    def counter():
        n = 0

        def count():
            nonlocal n
            n += 1
            return n

        return count

    changing, n = counter(), 3
    return lambda: changing() * n


COUNTERS = {
    f"counts {counter.__name__.replace('_', ' ')}": counting(counter)
    for counter in (
        in_an_attribute,
        in_a_default,
        in_a_keyword_default,
        in_a_class,
        in_a_module,
        in_a_module_of_a_module,
        in_a_list_known_by_its_method,
        in_an_attribute_of_a_tensor,
        in_a_context_variable,
        in_an_inner_function,
        in_a_global_of_an_object,
        in_an_iterator,
        in_a_generator,
        in_new_data,
        in_an_array,
        in_an_object_known_by_a_weak_reference,
        in_one_of_two_of_a_name,
    )
}
