"""The prepared process: it has imported what calls need, and forks a process for each, which goes on in `child.py`.

It runs and reads nothing of any tenant's, so it has nothing to hand on from one call to another, except that they share the
addresses of what it has loaded and the seed of Python's hashes. A source is not run before the fork: the layers that it needs
to be shut in forbid to fork.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from env_service.sandbox import child

IDLE_S = 60.0
"""Seconds without a call after which it ends."""
NUM_DESCRIPTORS = 4


def main() -> None:
    """Arguments: the descriptor on which calls arrive, the folder of this program, that of packages, and what to import."""
    number, _, site, *modules = sys.argv[1:]
    sys.path.append(site)
    for name in modules:  # once shut in, the call no longer finds their files
        __import__(name)
    del sys.path[-2:], sys.argv[1:]
    child.main(*forked(socket.socket(fileno=int(number))))


def forked(requests: socket.socket) -> list[int]:
    """Forks a process for each byte that arrives. Returns there, with the descriptors that came with it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that have ended: they told the worker
    requests.settimeout(IDLE_S)
    while True:
        asked, descriptors = b"", list[int]()
        with contextlib.suppress(TimeoutError):
            asked, descriptors, _, _ = socket.recv_fds(requests, 1, NUM_DESCRIPTORS)
        if not asked:
            os._exit(0)
        with contextlib.suppress(OSError):  # no room for a process: for the worker the call was killed
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                return descriptors
        for descriptor in descriptors:
            os.close(descriptor)
