"""Random models like those of third parties: every exact engine gives autograd's gradients or raises.

``pytest -m slow -n 0 -s tests/depth/programs --programs 20000`` runs as many and counts outcomes, refusals by reason.
"""

import re
from collections import Counter
from contextlib import suppress

import pytest
import torch
from fixed_examples import FIXED
from found_programs import DESCRIBED
from hypothesis import event, given, settings
from random_networks import SAMPLES, WIDTH, RandomNetwork
from random_programs import ENGINES, PROGRAMS, Program

import gradfree

EXACTLY = 1e-9

pytestmark = pytest.mark.filterwarnings("ignore")


def outcome(network, program):
    """Return the losses of all steps and the gradients of parameters, inputs and observed states."""
    found, retain = [], program.backward in ("retained", "twice")
    network.seen, network.tapped = [], []
    trained = [p for p in network.parameters() if p.requires_grad]
    for step in range(program.steps):
        network.zero_grad()
        network.tapped.clear()
        torch.manual_seed(program.seed + step)
        x = torch.randn(SAMPLES, WIDTH).requires_grad_(program.input)
        total, last = network(x * 1.0)
        loss = total + last
        given = [*trained, *([x] if program.input else [])]
        asked = {
            "grad of parameters": trained,
            "grad of all": given,
            "grad of the stem": [*network.stem.parameters()] or trained[:1],
            "grad of states": network.tapped or trained,
            "grad of states and parameters": [*network.tapped, *trained],
        }
        if program.backward == "two passes, one loss":
            loss = loss + sum(network(x * 0.9))
        elif program.backward == "two losses":
            sum(network(x * 0.9)).backward()
        elif program.backward == "taps first":
            total.backward(retain_graph=True)
            loss = last
        elif program.backward == "taps of a freed graph":
            last.backward()
            loss = total
        elif program.backward == "a block frozen before":
            network.blocks[1].requires_grad_(False)
        elif program.backward == "grad of states, then backward" and network.tapped and not network.seen:
            with suppress(RuntimeError):
                torch.autograd.grad(loss, network.tapped, retain_graph=True, allow_unused=True)
        if program.backward in asked:
            gradients = torch.autograd.grad(loss, asked[program.backward], allow_unused=True)
        else:
            loss.backward(retain_graph=retain)
            if program.backward in ("twice", "freed"):
                loss.backward()
            gradients = [p.grad for p in given]
        for p in trained:
            p.requires_grad_(True)
        found += [loss, *gradients]
        # Where the loss uses none of the parameters, the chain is solved all the same, and hooks behind it run.
        found += network.watched() if any(g is not None for g in gradients) else []
    return [None if g is None else g.detach().clone() for g in found]


def verdict(program: Program) -> str:
    """Run ``program`` with and without its engine; assert that it is right and return the outcome."""
    expected, failure = attempted(RandomNetwork(program), program)
    network, (name, options) = RandomNetwork(program), ENGINES[program.engine]
    engine = gradfree.create_engine(name, **options)
    try:
        with engine.attach(network, network.chains, batched=batched(program)) as handle:
            actual, error = attempted(network, program)
            splits = {reason for path in network.chains for reason in handle.chains[path].splits.values()}
    except gradfree.ChainError as refused:
        error = refused
    if isinstance(error, gradfree.ChainError):
        return "refused: " + reason(error)
    # Torch frees what a block takes by a closure from before the chain with the block's graph.
    freed = "older state" in operations_of(program) and "a second time" in f"{error} {failure}"
    if error is not None:
        # torch.autograd.grad leaves a reentrant checkpoint out if the gradients of its inputs are not requested.
        incompatible = "use_reentrant=True" in str(error) and program.backward.startswith("grad")
        # Torch fails if an output of a function, other than the first, is changed in place and retains its gradient.
        retained = "out != nullptr INTERNAL ASSERT" in str(error) and "retain_grad" in program.between
        # torch.autograd.grad for states alone needs only a part of the graph, without what was changed.
        changed = "modified by an inplace operation" in str(error) and program.backward.startswith("grad")
        known = failure is not None or incompatible or retained or freed or changed
        assert known, f"torch's error, which is none without the engine: {error}"
        return "torch refuses"
    if failure is not None:
        # The output of a row needs a gradient if the blocks' parameters do, whether the blocks use them or not.
        unused = program.whole and "does not require grad" in str(failure)
        # It is a copy, which may be changed in place.
        changed = program.whole and "modified by an inplace operation" in str(failure)
        assert unused or changed or freed, f"no error, but without the engine: {failure}"
        return "torch refuses"
    assert_same(without_zeros(actual, expected, program), expected, 1e-4 if single(program) else EXACTLY)
    return "; ".join(["exact", *splits])


def attempted(network, program):
    """Return the outcome, or the error in its place."""
    try:
        return outcome(network, program), None
    except RuntimeError as error:
        return None, error


def batched(program):
    """Return the option as the engine expects it."""
    name, options = ENGINES[program.engine]
    at_once = name in ("highway_bp", "fixed_point", "dsf", "truncated") and "segments" not in options
    # A row does not see hooks that a function called by forward registers.
    at_once &= operations_of(program).isdisjoint({"hooked", "hook"})
    return program.batched if at_once else "auto"


def single(program):
    """Return whether anything is computed in single precision."""
    return "single" in program.between or "float" in operations_of(program)


def operations_of(program):
    """Return the operations of all blocks."""
    return {name for block in (*program.blocks, *program.more) for name in block.operations}


def without_zeros(actual, expected, program):
    """Drop gradients of zero that custom functions return where autograd has none."""
    custom = operations_of(program) & {"reentrant", "custom view", "square", "halving"}
    if not custom and program.around != "reentrant":
        return actual
    return [None if e is None and a is not None and not a.any() else a for a, e in zip(actual, expected, strict=True)]


def reason(error):
    """Return a message without the parts that depend on the model."""
    return re.sub(r"(blocks|more)(\.\d+)?|\(\d[\d, ]*\)", "…", str(error))[:100]


def assert_same(actual, expected, within):
    """Assert that all gradients are the same, and missing where they are missing."""
    assert [a is None for a in actual] == [e is None for e in expected]
    largest = max((e.abs().max().item() for e in expected if e is not None), default=0.0)
    for a, e in zip(actual, expected, strict=True):
        if a is not None:
            torch.testing.assert_close(a, e, rtol=0, atol=within * max(largest, 1e-9), equal_nan=True)


@pytest.mark.parametrize("name", DESCRIBED)
def test_unusual_programs_are_right(name):
    """They give autograd's gradients, or the engine raises with a reason; a chain is split only with a reason."""
    program, expected = DESCRIBED[name]
    found = verdict(program)
    assert found == expected if expected == "exact" else found.startswith(expected)


@given(PROGRAMS)
@settings(FIXED, max_examples=40)
def test_random_programs_are_exact_or_refused(program):
    """All gradients are autograd's, or the engine raises; what torch refuses is refused here, too."""
    event(verdict(program))


@pytest.mark.slow
def test_many_random_programs_are_exact_or_refused(pytestconfig):
    """The same test with as many programs as ``--programs`` says; prints the outcomes."""
    verdicts = Counter()

    @given(PROGRAMS)
    @settings(FIXED, max_examples=pytestconfig.getoption("--programs"))
    def run(program):
        verdicts[verdict(program)] += 1

    run()
    print(verdicts.total(), "programs", *(f"{count:6} {what}" for what, count in verdicts.most_common()), sep="\n")
