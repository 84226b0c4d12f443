"""Layers on ranks, trained by passes that only go forward, have the weights of one process.

After 20 steps in float64, retraction and a temperature that is learnt included, in microbatches of unequal size.
"""

from pathlib import Path

import pytest
import torch
from rank_processes import results_of_ranks, run_ranks

from gradfree.benchmarks.maps.step_time import forward_only_share as share
from gradfree.pipelines.order import order

SCRIPT = Path(__file__).with_name("forward_ranks.py")
SAID = (
    "'foton'",
    "'foton'",
    "refresh_feedback_every=1",
    "microbatches",
    "no weights",
    "too few",
    "0.weight",
    "chains=",
)
STOPPED = {
    "first pass": (1, "the layer's own error"),
    "second pass": (1, "the layer's own error"),
    "absent": (3, "depends on stem.weight"),
}
"""The rank that fails, and what it says."""


@pytest.mark.processes
@pytest.mark.slow
def test_two_and_four_ranks_train_as_one_process(tmp_path):
    found = results_of_ranks(tmp_path, SCRIPT, ranks=4)
    assert max(found[0][case] for case in found[0] if case != "refused") < 1e-9
    assert len(found[0]) == 6
    for rank in found:
        wrong = [said for part, said in zip(SAID, rank["refused"], strict=True) if part not in said]
        assert not wrong


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("way", STOPPED)
def test_a_rank_that_fails_is_named_when_it_ends(tmp_path, way):
    """Without a timeout of the process group, which they would wait for."""
    its, error = STOPPED[way]
    run_ranks(SCRIPT, tmp_path, way, ranks=4)
    for number in range(4):
        said, afterwards = torch.load(tmp_path / f"{number}.pt")
        assert error in said, number
        assert "this pipeline has stopped" in afterwards, number
        assert said in afterwards, number
        assert number == its or f"rank {number} waited for rank" in said, number


def finished(count, microbatches, steps):
    """Return when the first and the last step are done on the last rank, by running the jobs of all ranks."""
    jobs = {r: [(s, *job) for s in range(steps) for job in order(r, count, microbatches)] for r in range(count)}
    free, done, ready = [0] * count, {}, dict.fromkeys(range(count), 0)

    def needs(rank, step, job, j):
        if job == "feedback":
            return [(rank + 1, step, job, j)] if rank < count - 1 else []
        before = [(rank - 1, step, job, j)] if rank else []
        if job == "second pass" and rank == 0:
            return [(count - 1, step, "first pass", j), (0, step, "feedback", 0)]
        return before

    while any(ready[r] < len(jobs[r]) for r in jobs):
        moved = False
        for rank in jobs:
            while ready[rank] < len(jobs[rank]):
                step, job, j = jobs[rank][ready[rank]]
                if any(need not in done for need in needs(rank, step, job, j)):
                    break
                start = max([free[rank], *(done[need] for need in needs(rank, step, job, j))])
                units = 0 if job == "feedback" else 1
                done[rank, step, job, j] = start + units
                # What goes on is sent before the weights' gradients.
                free[rank] = start + (2 if job == "second pass" else units)
                ready[rank], moved = ready[rank] + 1, True
        assert moved, "all ranks wait"
    return free[-1]


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 16])
def test_steps_take_what_the_formula_says(count, microbatches):
    """No rank waits for ever; steps in a row have no bubble with as many microbatches as ranks, one alone has."""
    unit = 3 * microbatches * count
    assert finished(count, microbatches, 1) == round(share(count, microbatches, more=False) * unit)
    in_a_row = (finished(count, microbatches, 12) - finished(count, microbatches, 4)) / 8
    assert in_a_row == pytest.approx(share(count, microbatches) * unit)
