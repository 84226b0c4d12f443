"""Random models that change while an engine is attached: gradients are autograd's, or the engine raises.

``pytest -m slow -n 0 -s tests/changes --programs 3000`` runs as many of each kind and counts outcomes, refusals by
reason.
"""

import re
from collections import Counter

import pytest
import torch
from changing_models import Network
from changing_programs import KINDS, Program
from fixed_examples import FIXED
from hypothesis import event, given, settings

import gradfree

EXACTLY = 1e-9

pytestmark = pytest.mark.filterwarnings("ignore")


def outcomes(network, program):
    """Yield the loss and all gradients of each pass, by name; an error ends them."""
    optimizer = torch.optim.SGD(network.parameters(), 1e-3)
    for step in range(program.steps):
        torch.manual_seed(program.seed + step)
        changes = [change for change in program.changes if change.step == step]
        late = [change for change in changes if change.between]
        for change in changes:
            if change not in late:
                network.apply_change(change)
        if program.evaluated:
            with torch.no_grad():
                network(network.input(step))
        for turn in range(program.repeated):
            yield one_pass(network, program, step, late if turn == 0 else [])
            optimizer.step()


def one_pass(network, program, step, changes):
    """Return the loss and all gradients of a pass, in which ``changes`` happen behind its forward."""
    if program.backward != "accumulated":
        network.zero_grad()
    x = network.input(step)
    loss = network(x)
    for change in changes:
        network.apply_change(change)
    given = {"x": x, **dict(network.named_parameters()), **dict(network.named_buffers())}
    given = {name: tensor for name, tensor in given.items() if tensor.requires_grad}
    if program.backward == "grad of all":
        found = dict(zip(given, torch.autograd.grad(loss, list(given.values()), allow_unused=True), strict=True))
    else:
        loss.backward(retain_graph=program.backward == "twice")
        if program.backward == "twice":
            loss.backward()
        found = {name: tensor.grad for name, tensor in given.items()}
    return {name: None if t is None else t.detach().clone() for name, t in {"": loss, **found}.items()}


def attempted(network, program):
    """Return the outcomes before an error, and the error, if any."""
    found, error = [], None
    try:
        # Keeps what came before an error.
        found.extend(outcomes(network, program))
    except (RuntimeError, ValueError) as raised:
        error = raised
    return found, error


def verdict(program: Program) -> str:
    """Run ``program`` with and without its engine; assert that it is right and return the outcome."""
    expected, failure = attempted(Network(program), program)
    network, (name, options) = Network(program), program.on
    engine = gradfree.create_engine(name, **options)
    actual, error = [], None
    try:
        with attached(engine, network, program):
            actual, error = attempted(network, program)
    except gradfree.ChainError as refused:
        error = refused
    for step, (a, e) in enumerate(zip(actual, expected, strict=False)):
        # A cell that runs without a graph may see another grad mode, and round where it did not.
        assert_same(a, e, f"pass {step}", 1e-4 if program.act == "float" and program.trigger != "never" else EXACTLY)
    if isinstance(error, gradfree.ChainError):
        return f"refused: {reason(error)}"
    # Torch frees what a computed weight was computed with; engines keep the graphs of blocks.
    freed = "a second time" in str(failure) and any(change.what == "a computed weight" for change in program.changes)
    assert (error is None) == (failure is None) or freed, f"with the engine: {error}; without: {failure}"
    if failure is not None:
        return f"torch refuses: {reason(failure)}"
    assert len(actual) == len(expected)
    return "exact"


def attached(engine, network, program):
    """Attach the engine to the network, or to its body."""
    batched = program.batched if engine.pulls_at_once and program.model in ("sequential",) else "auto"
    if program.head:
        return engine.attach(network, ["body"], batched=batched)
    return engine.attach(network.body, [""], batched=batched)


def reason(error):
    """Return a message without the parts that depend on the model."""
    return re.sub(r"(body\.?)?\b\d+\b(, (body\.)?\d+)*|\(\d[\d, ]*\)", "…", str(error))[:100]


def assert_same(actual, expected, where, within):
    """Assert that all gradients are the same, and missing where they are missing."""
    assert actual.keys() == expected.keys(), where
    missing = {name for name, a in actual.items() if a is None}
    assert missing == {name for name, e in expected.items() if e is None}, where
    for name in actual.keys() - missing:
        size = max(expected[name].abs().max().item(), 1e-3)
        torch.testing.assert_close(
            actual[name],
            expected[name],
            rtol=0,
            atol=within * size,
            equal_nan=True,
            msg=lambda m, n=name: f"{where}, {n}: {m}",
        )


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_change_are_exact_or_refused(kind):
    """All gradients are autograd's, or the engine raises; what torch refuses is refused here, too."""

    @given(KINDS[kind])
    @settings(FIXED, max_examples=25)
    def run(program):
        event(verdict(program))

    run()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_models_that_change_are_exact_or_refused(kind, pytestconfig):
    """The same test with as many programs of each kind as ``--programs`` says; prints the outcomes."""
    verdicts = Counter()

    @given(KINDS[kind])
    @settings(FIXED, max_examples=pytestconfig.getoption("--programs"))
    def run(program):
        verdicts[verdict(program)] += 1

    run()
    print(kind, verdicts.total(), "programs", *(f"{n:6} {what}" for what, n in verdicts.most_common()), sep="\n")
