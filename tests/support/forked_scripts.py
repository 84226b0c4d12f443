"""Scripts in processes of their own, forked from one that has imported what is slow to import.

It is also the one that the workers of benchmarks are forked from.
"""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from tempfile import mkstemp

from gradfree.benchmarks.running.workers import PRELOADED, prepare

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([*PRELOADED, "gradfree.lightning", "gradfree.ranks.stage", "pytest"])


class Script:
    """A process that runs a script, as ``python SCRIPT ARGUMENTS`` does.

    Args:
        script: its path.
        arguments: behind the path.
        environment: beside that of this process.
    """

    def __init__(self, script, *arguments, environment=None):
        written, name = mkstemp()
        self._written = os.fdopen(written)
        given = str(script), [str(argument) for argument in arguments], {**os.environ, **(environment or {})}, name
        self._process = _SERVER.Process(target=_run, args=given, daemon=True)
        self._process.start()

    def ended(self, timeout=300):
        """Wait for its end; return its exit status and what it has written to stdout and stderr.

        One that has not ended after ``timeout`` seconds is killed, and has the status ``None``.
        """
        self._process.join(timeout)
        status = self._process.exitcode
        self.kill()
        return status, self._written.read()

    def is_alive(self):
        """Tell whether it has not ended."""
        return self._process.is_alive()

    def kill(self):
        """End it, whatever it does."""
        self._process.kill()
        self._process.join()


def _run(script, arguments, environment, written):
    file = os.open(written, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.unlink(written)
    os.environ |= environment
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    prepare()
    runpy.run_path(script, run_name="__main__")
