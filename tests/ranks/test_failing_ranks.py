"""A rank that fails during training stops the others within the timeout, with an error that names rank and module."""

import time
from pathlib import Path

import pytest
import torch
from rank_processes import start_ranks

SCRIPT = Path(__file__).with_name("failing_ranks.py")
CAUSES = {
    "killed": "",
    "killed in backward": "",
    "raises": "ValueError: the block's own error",
    "ends in backward": "ValueError: the block's own error",
    "hangs": "",
    "another loss": "ChainError: the loss is not that of the last rank",
    "nan": "ChainError: non-finite cotangent at the output of blocks.2",
}
"""The second rank's own error, if it is still there."""
AT_ONCE = {
    "no residual path": "ChainError: no residual path from 'blocks.",
    "another engine": "differ in the engine: rank 0 has HighwayBP(iterations=1",
    "another model": "differ in the weight 'blocks.0.linear.bias': rank 0 has (6,), torch.float64, trained",
}


def errors_of(folder, ways):
    """Return the errors of the surviving ranks by way and rank; all ways run at once, because they mostly wait."""
    ranks = []
    for way in ways:
        (folder / way).mkdir()
        ranks += start_ranks(SCRIPT, folder / way, way, ranks=3)
    # The second rank writes nothing if it was killed or hangs.
    expected = len(ranks) - sum(way in ("killed", "killed in backward", "hangs") for way in ways)
    end = time.monotonic() + 240
    while sum(map(len, files(folder, ways))) < expected and time.monotonic() < end and any(r.is_alive() for r in ranks):
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
    found = zip(ways, files(folder, ways), strict=True)
    return {way: {int(p.stem): torch.load(p) for p in written} for way, written in found}


def files(folder, ways):
    """Return the files that ranks have written so far, by way."""
    return [list((folder / way).glob("*.pt")) for way in ways]


@pytest.mark.processes
@pytest.mark.slow
def test_a_failing_rank_stops_the_others(tmp_path):
    found = errors_of(tmp_path, CAUSES) | errors_of(tmp_path, AT_ONCE)
    for way, cause in CAUSES.items():
        assert {0, 2} <= found[way].keys(), way
        for rank in (0, 2):
            # Rank 0 gets the NaN, too.
            expected = f"ChainError: rank {rank} waited for rank" if rank or way != "nan" else "ChainError"
            assert found[way][rank].startswith(expected), way
        text = found[way][0] + found[way][2]
        assert "rank 1 to send or receive" in text, way
        assert found[way].get(1, "").startswith(cause), way
        assert "blocks." in text, way
    for way, reason in AT_ONCE.items():
        assert len(found[way]) == 3, way
        for rank, said in found[way].items():
            assert reason in said, (way, rank)
