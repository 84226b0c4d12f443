"""``scan`` in segments against the loop: outputs, final carries and all gradients in float64."""

import pytest
from scan_tasks import KINDS, CutTask, compare


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
