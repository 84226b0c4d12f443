"""Scripts in separate processes, forked from a server that has imported all slow modules.

The workers of the benchmarks are forked from the same server.
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
    """A process that runs a script like ``python SCRIPT ARGUMENTS``.

    Args:
        script: the script's path.
        arguments: its arguments.
        environment: variables added to this process's environment.
    """

    def __init__(self, script, *arguments, environment=None):
        written, name = mkstemp()
        self._written = os.fdopen(written)
        given = str(script), [str(argument) for argument in arguments], {**os.environ, **(environment or {})}, name
        self._process = _SERVER.Process(target=_run, args=given, daemon=True)
        self._process.start()

    def ended(self, timeout=300):
        """Wait for the end; return the exit status and the output on stdout and stderr.

        After ``timeout`` seconds the process is killed, and the status is ``None``.
        """
        self._process.join(timeout)
        status = self._process.exitcode
        self.kill()
        return status, self._written.read()

    def is_alive(self):
        """Return whether the process is running."""
        return self._process.is_alive()

    def kill(self):
        """Kill the process."""
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
