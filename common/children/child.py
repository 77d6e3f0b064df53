"""Runs a command that dies with the process that started it: `python -IS child.py <parent pid> <command…>`.

Only this user can read what the command writes.

A program of its own with nothing but the standard library, because code between fork and exec (`preexec_fn`) can deadlock
in a process with threads. The exec keeps the process id.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Does not return."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    os.umask(0o077)
    tie_to(parent)
    os.execvp(command[0], command)


def tie_to(parent: int) -> None:
    """Ends this process with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The kernel signals when the thread that made this process ends. The order lasts over an exec, not over a fork:
    # each child ties itself. A parent that died before the line above signals no more.
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
