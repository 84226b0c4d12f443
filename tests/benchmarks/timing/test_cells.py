"""The passes of the suite of cells compute one thing in different ways."""

from functools import partial

import numpy as np
import pytest
import torch

from gradfree import create_engine
from gradfree.benchmarks.timing.cells import CellPass, Sequences, cells, jax_cell_pass
from gradfree.benchmarks.timing.narrow_steps import NarrowPass, NarrowSequences, jax_narrow_pass, narrow_steps
from gradfree.benchmarks.timing.timed import Timing
from gradfree.scans.scan import scan

CASE = Timing(timed=cells, item=Sequences(2, 200, 8), device="cpu", seed=0)


def gradients(of):
    of()
    return [weight.grad for weight in of.cell.parameters()]


def test_scan_has_the_gradients_of_the_loop():
    for own, loops in zip(gradients(CellPass(CASE, scan, before=9)), gradients(CellPass(CASE)), strict=True):
        torch.testing.assert_close(own, loops, rtol=1e-4, atol=1e-6)


def test_jax_has_the_gradients_of_the_loop():
    pytest.importorskip("jax")
    of = jax_cell_pass(CASE)
    _, found = of.gradients(*of.arguments)
    loop = CellPass(CASE)
    gradients(loop)
    for name, weight in loop.cell.named_parameters():
        np.testing.assert_allclose(found[name], weight.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("step", ["compressor", "state variable filter", "ladder filter", "Van der Pol"])
def test_newton_has_the_gradients_of_the_loop_and_of_jax(step):
    case = Timing(timed=narrow_steps, item=NarrowSequences(step, 2, 60), device="cpu", seed=0)
    passes = [NarrowPass(case), NarrowPass(case, partial(scan, engine=create_engine("newton", max_sweeps=20)))]
    for each in passes:
        each()
    own, other = (each.parameters.grad for each in passes)
    torch.testing.assert_close(other, own, rtol=1e-4, atol=1e-6)
    pytest.importorskip("jax")
    of = jax_narrow_pass(case)
    np.testing.assert_allclose(of.gradients(*of.arguments)[1], own.numpy(), rtol=1e-4, atol=1e-6)
