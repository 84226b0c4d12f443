"""Forked processes, which need no time for imports."""

import os
import sys
import traceback


def fork(work, *args):
    """Call ``work`` in a forked process; return its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work(*args)
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def exit_code(child):
    """Wait for a process; return its exit code, negative if it was killed by a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
