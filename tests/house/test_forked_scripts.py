"""Scripts that tests run in processes of their own take no core once nobody waits for them."""

import pytest
import rank_processes
from forked_scripts import Script

FOREVER = "import threading; threading.Event().wait()"


@pytest.mark.processes
@pytest.mark.slow
def test_a_script_that_does_not_end_in_time_is_killed(tmp_path):
    (tmp_path / "forever.py").write_text(FOREVER)
    script = Script(tmp_path / "forever.py")
    status, _ = script.ended(timeout=0)
    assert status is None
    assert not script.is_alive()


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_end_with_the_first_that_fails(tmp_path, monkeypatch):
    (tmp_path / "ranks.py").write_text(f"import os; assert os.environ['RANK'] == '1', 'the first'; {FOREVER}")
    started = rank_processes.start_ranks(tmp_path / "ranks.py")
    monkeypatch.setattr(rank_processes, "start_ranks", lambda *script, ranks: started)
    with pytest.raises(AssertionError, match="the first"):
        rank_processes.run_ranks(tmp_path / "ranks.py")
    assert not any(rank.is_alive() for rank in started)
