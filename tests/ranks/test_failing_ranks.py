"""A rank that fails in mid-training stops the others within the timeout, with an error that names it and the module."""

from pathlib import Path

import pytest
import torch
from rank_processes import start_ranks

SCRIPT = Path(__file__).with_name("failing_ranks.py")
TIMEOUT = 20


def told(folder, way):
    """Return what the ranks that were not killed have said, and after how many seconds."""
    for process in start_ranks(SCRIPT, folder, way, ranks=3):
        process.communicate(timeout=200)
    return {int(path.stem): torch.load(path) for path in folder.glob("*.pt")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("killed", "It has ended"),
        ("killed in backward", "It has ended"),
        ("hangs", "hangs"),
        ("raises", "What has stopped it: the block's own error"),
        ("nan", "What has stopped it: non-finite cotangent at the output of blocks.2"),
    ],
)
def test_the_others_stop(tmp_path, way, cause):
    found = told(tmp_path, way)
    assert {0, 2} <= found.keys()
    for rank in (0, 2):
        said, seconds = found[rank]
        # Rank 0 is given the NaN, too.
        assert said.startswith(f"ChainError: rank {rank} waited for rank" if rank or way != "nan" else "ChainError")
        assert seconds < 3 * TIMEOUT
    text = found[0][0] + found[2][0]
    assert "rank 1, for" in text
    assert cause in text
    assert "blocks." in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("another engine", r"differ in the engine: rank 0 has HighwayBP(iterations=1"),
        ("another model", r"differ in the weight 'blocks.0.linear.bias': rank 0 has (6,), torch.float64, trained"),
    ],
)
def test_ranks_that_differ_refuse_at_once(tmp_path, way, what):
    found = told(tmp_path, way)
    assert len(found) == 3
    assert all(what in said and "rank 1 has" in said for said, _ in found.values())
