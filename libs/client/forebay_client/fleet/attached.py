"""Runs a command that does not outlive the process that started it, however that one ends.

Usage: python -I -S attached.py PARENT_PID COMMAND…

The command gets a session of its own, so that Ctrl-C in the terminal reaches the supervisor alone,
which then stops everything in order. On Linux the kernel sends it SIGTERM when the parent dies.
Standard library only, and little of it: it runs before every service.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # It may have died before we asked to be told.
    if os.getppid() != parent:
        sys.exit("the supervisor is gone")
    os.execvp(command[0], command)  # noqa: S606 - the supervisor's own command


if __name__ == "__main__":
    main()
