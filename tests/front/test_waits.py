"""No step of any engine waits for the device, except sweeps to a tolerance: before the first and after each.

The tests' pretended device counts the waits: ``pytest --device pretend``.
"""

from dataclasses import replace

import pretend_device
import pytest

import gradfree
from gradfree.errors import ChainError
from gradfree.testing.cases.cases import CASES, Specimen, isolated

ENGINES = {name: gradfree.create_engine(name) for name in gradfree.list_engines()}
ENGINES["backprop, plain=False"] = gradfree.create_engine("backprop", plain=False)
UNTIL_A_TOLERANCE = {
    "highway_bp, tolerance": gradfree.create_engine("highway_bp", tolerance=1e-3),
    "fixed_point, tolerance": gradfree.create_engine("fixed_point", tolerance=1e-6),
    "shooting, segments": gradfree.create_engine("shooting", segments=3),
    "newton, sweeps": gradfree.create_engine("newton", max_sweeps=9),
}


MORE = {("newton, sweeps", "CellLayer of any cell"): 2}
"""Newton's method on a loop also waits for which rows depend on each other, and whether rounding ends it."""


def waits_of(step):
    before = pretend_device.waits()
    step()
    return pretend_device.waits() - before


def counted(engine, case):
    """Return the waits of a step with and without the engine, and when sweeps end; ``None`` if the chain is refused.

    Waits at attaching and in the first steps, which happen once for each model, do not count.
    """
    specimen = Specimen(case)
    # An engine that needs the loss runs the model twice more, whatever that waits for.
    plain = waits_of(specimen.gradients) * (3 if "loss" in engine.needs else 1)
    try:
        with specimen.attached(engine):
            for _ in range(2):
                specimen.gradients()
            waits = waits_of(specimen.gradients)
            with gradfree.engine_figures() as figures:
                specimen.gradients()
    except ChainError:
        return None
    looks = [int(found[name]) + 1 for found in figures.values() for name in found if name.endswith("sweeps")]
    return waits, plain, sum(looks)


@pytest.fixture
def _takes_pinned_memory(monkeypatch):
    """As on a GPU: copies of packed sequences to it are not waited for."""
    monkeypatch.setattr("gradfree.devices.hardware.keeps_pinned", lambda device: device.type == pretend_device.NAME)


@pytest.mark.usefixtures("_takes_pinned_memory")
@pytest.mark.parametrize("name", [*ENGINES, *UNTIL_A_TOLERANCE])
def test_steps_do_not_wait_for_the_device(name, device):
    if device != pretend_device.NAME:
        pytest.skip("counted on the device of these tests")
    sweeping = name in UNTIL_A_TOLERANCE
    engine = UNTIL_A_TOLERANCE[name] if sweeping else ENGINES[name]
    with isolated():
        cases = [replace(case, device=device) for case in CASES]
        taken = {case.name: counts for case in cases if (counts := counted(engine, case)) is not None}
    assert taken
    assert not {
        case: waits - plain
        for case, (waits, plain, looks) in taken.items()
        if waits - plain > (looks + MORE.get((name, case), 0) if sweeping else 0)
    }
