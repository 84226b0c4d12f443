"""Random recurrent programs: every exact engine gives autograd's outputs and gradients, or refuses.

``pytest -m slow -n 0 -s tests/time/programs/test_random_recurrences.py --programs 5000`` counts the verdicts.
"""

from collections import Counter
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from fixed_examples import FIXED
from hypothesis import given, settings
from pairwise import cover
from recurrences import ENGINES, PROGRAMS, Program, Recurrence, drawn
from torch.utils.checkpoint import CheckpointError

import gradfree

PAIRS = cover(drawn(6000))

pytestmark = pytest.mark.filterwarnings("ignore")


def refused(program):
    """Return whether the engine must refuse: it needs a gate, or its feedback does not fit the state."""
    gated = program.layer.startswith("para") or program.layer in ("gru", "lstm")
    needs = "gate" in program.engine or program.engine.startswith("highway_bp")
    return (needs and not gated) or (program.engine == "dsf linspace" and program.layer == "two parts")


def verdict(program):
    """Run ``program`` with and without its engine; return the verdict, or fail if the results differ."""
    recurrence = Recurrence(program)
    expected, failure = attempted(recurrence)
    name, options = ENGINES[program.engine]
    single = program.dtype == "float32"
    if "tolerance" in options and single:
        options = {**options, "tolerance": 1e-5}
    recurrence = Recurrence(program)
    try:
        with laid_out(program.layout), gradfree.create_engine(name, **options).attach(recurrence.layer):
            actual, error = attempted(recurrence)
    except gradfree.ChainError as refusal:
        error = refusal
    assert isinstance(error, gradfree.ChainError) == refused(program), error
    if refused(program):
        return "refused"
    if failure is not None:
        assert error is not None or program.around == "final in place", f"no error, but without the engine: {failure}"
        return "torch refuses"
    # Segments learn from each pass, so a checkpoint's second pass may save other tensors, for which torch raises.
    if program.around == "checkpoint" and "shooting" in program.engine and isinstance(error, CheckpointError):
        return "torch refuses the checkpoint"
    assert error is None, f"torch's error, which is none without the engine: {error}"
    within = 1e-3 if single else 10 * options.get("tolerance", 1e-11)
    assert_same(actual[1], expected[1], within)
    rounded = (program.layer == "lstm" and single and not _ROUNDS_ALIKE) or "runs" in program.layout
    assert_same(actual[0], expected[0], within if "tolerance" in options or rounded else 0.0)
    return "exact"


def laid_out(layout):
    """Let packed sequences run in a given layout: these are too small for any but "whole"."""
    if layout == "chosen":
        return nullcontext()
    names = {"packed_layout": lambda *_, **__: layout.removeprefix("padded ")}
    if layout == "padded runs":
        names["in_calls"] = in_few_calls
    return patch.multiple("gradfree.time.torch_layer_site", **names)


def in_few_calls(kind, runs, *_, **__):
    """Return the runs in as few calls as there can be to have several, one of them padded; only LSTMs take padding."""
    return [runs[:2], *([run] for run in runs[2:])] if kind == "LSTM" else [[run] for run in runs]


def _rounds_alike():
    """Return whether torch's LSTM has the same outputs with a graph and without; before torch 2.13 it has not."""
    layer, x = torch.nn.LSTM(3, 4, dtype=torch.float32), torch.randn(5, 1, 3, dtype=torch.float32)
    return torch.equal(layer(x)[0], torch.no_grad()(layer)(x)[0])


_ROUNDS_ALIKE = _rounds_alike()


def attempted(recurrence):
    """Return the outcome and ``None``, or ``None`` and the error."""
    try:
        return recurrence.outcome(), None
    except RuntimeError as error:
        return None, error


def assert_same(actual, expected, within):
    """Assert that all are the same; a zero gradient is accepted where autograd has ``None``."""
    size = max([0.0, *(e.abs().max().item() for e in expected if e is not None and e.numel())])
    for a, e in zip(actual, expected, strict=True):
        if a is None or e is None:
            assert a is e or (e is None and not a.any())
        else:
            torch.testing.assert_close(a, e, rtol=0, atol=within * size)


@pytest.mark.parametrize(
    "program",
    [Program(*row) for row in (*PAIRS, *drawn(100))],
    ids=lambda program: f"{program.layer}, {program.engine}",
)
def test_programs_that_cover_all_pairs_of_settings(program):
    """And a hundred random programs: outputs and gradients equal autograd's, or the engine refuses."""
    verdict(program)


@pytest.mark.slow
def test_many_random_recurrences(pytestconfig):
    """Runs ``--programs`` programs, shrinks a failing one, and prints the number of each verdict."""
    verdicts = Counter()

    @given(PROGRAMS)
    @settings(FIXED, max_examples=pytestconfig.getoption("--programs"))
    def run(program):
        verdicts[verdict(program)] += 1

    run()
    print(verdicts.total(), "programs", *(f"{count:6} {what}" for what, count in verdicts.most_common()), sep="\n")
    assert verdicts["exact"] > verdicts.total() / 2
