"""Cells that a model calls in a loop: gradients are those of autograd, whatever the loop does, and steps are batched
where they can be.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from cell_tasks import CELLS, INPUT
from loop_models import BATCH, LOOPS, Looped, slices, stacked, watched, weighted
from oracles import assert_close, off_by

import gradfree
from gradfree.time.chain import TimeChain

STEPS = 6


def exact(cell, length=2 * STEPS):
    yield gradfree.create_engine("backprop")
    yield gradfree.create_engine("deeppcr")
    yield gradfree.create_engine("fixed_point", iterations=length)
    yield gradfree.create_engine("truncated", window=length)
    yield gradfree.create_engine("dsf", feedback=0.7, iterations=length)
    if cell.startswith(("gru", "lstm", "para")):
        yield gradfree.create_engine("highway_bp", iterations=length)


def gradients(model, x, **options):
    torch.manual_seed(1)
    loss = model(x, **options)
    leaves = [*model.parameters(), x]
    return [loss.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True)]


def same(actual, expected):
    assert [a is None for a in actual] == [e is None for e in expected]
    assert torch.equal(actual[0], expected[0])
    assert_close([a for a in actual if a is not None], [e for e in expected if e is not None])


@pytest.mark.parametrize("run", LOOPS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("cell", ["gru", "lstm", "leaky", "two parts"])
def test_gradients_are_those_of_autograd(cell, run):
    if (cell, run) == ("two parts", watched):
        pytest.skip("refused: see test_hooks_on_parts_of_states")
    model, x = Looped(cell, run), torch.randn(STEPS, BATCH, INPUT, requires_grad=True)
    expected = gradients(model, x)
    chains = ["cell", "upper"] if run is stacked else ["cell"]
    for engine in exact(cell):
        with engine.attach(model, chains):
            same(gradients(model, x), expected)


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_batched_and_bitwise(cell):
    """One chain of all steps, gradients exact, outputs the model's own to the bit."""
    model, x = Looped(cell, slices), torch.randn(STEPS, BATCH, INPUT, requires_grad=True)
    expected = gradients(model, x)
    for engine in exact(cell):
        with engine.attach(model, ["cell"]) as handle:
            same(gradients(model, x), expected)
            assert handle.chains["cell"].splits == {}


WHOLE = {
    "slices": [6],
    "columns": [6],
    "stem_inside": [6],
    "one_input": [6],
    "raw_inputs": [5],
    "residual": [6],
    "stacked": [6, 6],
    "truncated": [2, 2, 2],
    "without_gradients": [4],
    "two_sequences": [6, 6, 6],
}


@pytest.mark.parametrize("run", LOOPS, ids=lambda run: run.__name__)
def test_what_goes_in_one_batch(run, monkeypatch):
    """Loops whose steps depend on each other through the state alone are solved whole; others say why not."""
    lengths = []

    def noted(chain, length, *rest):
        lengths.append(length)
        made(chain, length, *rest)

    made = TimeChain.__init__
    monkeypatch.setattr(TimeChain, "__init__", noted)
    model, x = Looped("gru", run), torch.randn(STEPS, BATCH, INPUT, requires_grad=True)
    chains = ["cell", "upper"] if run is stacked else ["cell"]
    with gradfree.create_engine("backprop").attach(model, chains) as handle:
        gradients(model, x)
        splits = handle.chains["cell"].splits
    if run.__name__ in WHOLE:
        assert sorted(lengths) == WHOLE[run.__name__]
    else:
        assert splits


def refusal(model, x, **options):
    with (
        pytest.raises(gradfree.ChainError) as error,
        gradfree.create_engine("backprop").attach(model, ["cell"]),
    ):
        gradients(model, x, **options)
    return str(error.value)


def test_hooks_on_parts_of_states():
    """A hook on a part of a state would miss what other parts, computed from it, send back; not one on h of an LSTM."""
    x = torch.randn(STEPS, BATCH, INPUT, requires_grad=True)
    assert "has a gradient hook" in refusal(Looped("two parts", watched), x)

    def on_c(model, x):
        h, c = model.cell(x[0], model.initial())
        c.register_hook(lambda g: g * 2)
        return model.cell(x[1], (h, c))[0].sum()

    assert "has a gradient hook" in refusal(Looped("lstm", on_c), x)


def late_hook(model, x):
    first = model.cell(x[0], model.initial())
    second = model.cell(x[1], first)
    first.register_hook(lambda g: g)
    return second.sum() + first.sum()


def hook_on_an_input(model, x):
    fed = model.stem(x)
    state = model.cell(fed[0], model.initial())
    row = fed[1]
    state = model.cell(row, state)
    row.register_hook(lambda g: g)
    return state.sum()


def changed_state(model, x):
    first = model.cell(x[0], model.initial())
    second = model.cell(x[1], first)
    first += 1.0
    return second.sum()


def changed_input(model, x):
    fed = model.stem(x).detach()
    state = model.cell(fed[0], model.initial())
    fed.mul_(2.0)
    return state.sum()


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (late_hook, "after the next call has used it"),
        (hook_on_an_input, "an input of cell has got a gradient hook"),
        (changed_state, "changed in place"),
        (changed_input, "changed in place"),
    ],
    ids=lambda run: getattr(run, "__name__", ""),
)
def test_what_would_be_wrong_is_refused(run, says):
    assert says in refusal(Looped("gru", run), torch.randn(STEPS, BATCH, INPUT, requires_grad=True))


def test_a_state_asked_for_alone_is_refused():
    """torch.autograd.grad of a state inside the chain would have its direct cotangent only."""
    model, x = Looped("gru", slices), torch.randn(STEPS, BATCH, INPUT)
    with gradfree.create_engine("backprop").attach(model, ["cell"]):
        first = model.cell(x[0], model.initial())
        second = model.cell(x[1], first)
        with pytest.raises(gradfree.ChainError, match="direct cotangent only"):
            torch.autograd.grad(second.sum(), first)


class Talkative(torch.nn.Module):
    """Returns an output beside its state."""

    hidden_size = 4

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(INPUT, 4)

    def forward(self, x, state):
        state = torch.tanh(self.linear(x) + state)
        return state * 2, state


def test_a_cell_that_returns_more_than_its_state_is_refused():
    model = torch.nn.ModuleDict({"cell": Talkative()})
    with (
        gradfree.create_engine("backprop").attach(model, ["cell"]),
        pytest.raises(gradfree.ChainError, match="next state"),
    ):
        model["cell"](torch.randn(BATCH, INPUT), torch.zeros(BATCH, 4))


def test_other_calls_are_left_to_autograd():
    """Single samples, no state of a cell of one's own: gradients are autograd's, and the site says why."""
    model = torch.nn.ModuleDict({"cell": torch.nn.GRUCell(INPUT, 4)})
    x = torch.randn(INPUT)
    expected = torch.autograd.grad(model["cell"](x, torch.zeros(4)).sum(), list(model.parameters()))
    with gradfree.create_engine("backprop").attach(model, ["cell"]) as handle:
        assert_close(torch.autograd.grad(model["cell"](x, torch.zeros(4)).sum(), list(model.parameters())), expected)
        assert "no batch" in handle.chains["cell"].splits["cell"]


def test_zeros_to_start_from_keywords_and_varying_length():
    """state=None begins anew; names of arguments as the cell has them; passes of other lengths."""
    for cell in ("gru", "lstm", "rnn_tanh"):

        def run(model, x):
            state, states = None, []
            for row in model.stem(x):
                state = model.cell(input=row, hx=state)
                states.append(state)
            return weighted(states)

        model, x = Looped(cell, run), torch.randn(STEPS, BATCH, INPUT)
        expected = {n: gradients(model, x.requires_grad_(), steps=n) for n in (1, 4, 6)}
        with gradfree.create_engine("truncated", window=99).attach(model, ["cell"]) as handle:
            for n, want in expected.items():
                same(gradients(model, x, steps=n), want)
            assert handle.chains["cell"].splits == {}


def test_several_backward_passes():
    """retain_graph, losses of two passes, accumulation; a second pass through what is freed is refused as in torch."""
    model, x = Looped("gru", slices), torch.randn(STEPS, BATCH, INPUT)

    def run():
        model.zero_grad()
        loss = model(x) + model(x * 0.5)
        loss.backward(retain_graph=True)
        loss.backward()
        model(x).backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = run()
    with gradfree.create_engine("highway_bp", iterations=STEPS).attach(model, ["cell"]):
        assert_close(run(), expected)


@pytest.mark.parametrize("backward", [True, False])
def test_a_model_that_keeps_a_state_is_freed(backward):
    """What autograd's nodes lead to is no module, or Python could not collect the model; once freed, not the cell."""

    def keeping(model, x):
        fed = model.stem(x)
        model.last = model.cell(fed[1], model.cell(fed[0], model.initial()))
        if backward:
            model.cell.last = model.last
        return model.last.sum()

    model, x = Looped("gru", keeping), torch.randn(STEPS, BATCH, INPUT)
    with gradfree.create_engine("highway_bp", iterations=STEPS).attach(model, ["cell"]):
        loss = model(x)
        if backward:
            loss.backward()
    modules = [weakref.ref(model), *([weakref.ref(model.cell)] if backward else [])]
    del model, loss
    gc.collect()
    assert not any(module() for module in modules)


def test_frozen_cells_and_nothing_to_train():
    model, x = Looped("gru", slices), torch.randn(STEPS, BATCH, INPUT, requires_grad=True)
    model.cell.requires_grad_(False)
    loss = model(x)
    leaves = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(loss, [*leaves, x], allow_unused=True)
    with gradfree.create_engine("backprop").attach(model, ["cell"]):
        actual = torch.autograd.grad(model(x), [*leaves, x], allow_unused=True)
        assert_close([a for a in actual if a is not None], [e for e in expected if e is not None])
        model.requires_grad_(False)
        assert not model(x.detach()).requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_the_loop(reentrant):
    model, x = Looped("lstm", slices), torch.randn(STEPS, BATCH, INPUT, requires_grad=True)

    def run():
        model.zero_grad()
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = run()
    with gradfree.create_engine("deeppcr").attach(model, ["cell"]):
        assert_close(run(), expected)


def test_validate_and_no_trace():
    """A cell is found by name alone; attaching twice is refused; detaching, copies and pickles leave nothing behind."""
    model = Looped("gru", slices)
    engine = gradfree.create_engine("truncated")
    assert not engine.validate(model).ok
    report = engine.validate(model, ["cell"])
    assert report.ok
    assert str(report.chains["cell"]) == "GRUCell, called in a loop, in time"
    before = dict(vars(model.cell))
    with engine.attach(model, ["cell"]):
        assert "attached already" in str(engine.validate(model, ["cell"]).problems)
        assert not [key for key in model.state_dict() if "cell" not in key and "gradfree" in key]
        copied = copy.deepcopy(model)
        assert b"gradfree.loops" not in pickle.dumps(model.cell)
    assert vars(model.cell).keys() == before.keys()
    assert not model.cell._forward_hooks
    assert not model.cell._forward_pre_hooks
    x = torch.randn(STEPS, BATCH, INPUT)
    assert torch.equal(copied(x), model(x))


def test_dropout_inside_a_cell_is_refused():
    class Dropping(Talkative):
        def __init__(self):
            super().__init__()
            self.dropout = torch.nn.Dropout()

    report = gradfree.create_engine("backprop").validate(torch.nn.ModuleDict({"cell": Dropping()}), ["cell"])
    assert "would draw other masks" in str(report.problems)


@pytest.mark.parametrize("name", ["shooting", "newton"])
def test_engines_that_sweep_until_a_tolerance(name):
    """Their forward pass is the model's own here; the backward pass is theirs."""
    model, x = Looped("gru", slices), torch.randn(40, BATCH, INPUT, requires_grad=True)
    expected = gradients(model, x, steps=40)
    with gradfree.create_engine(name, tolerance=1e-12).attach(model, ["cell"]):
        actual = gradients(model, x, steps=40)
    assert torch.equal(actual[0], expected[0])
    assert off_by([a for a in actual if a is not None], [e for e in expected if e is not None]) < 1e-9
