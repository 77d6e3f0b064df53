"""Runs inside of vLLM's worker processes, which mix this class in: they end with the rollout worker that began them.

vLLM's processes outlive one that is killed with SIGKILL, and would keep the device's memory.
"""

import os
import select
import signal
import threading


class Guard:
    """vLLM's `worker_extension_cls`."""

    def end_with(self, pid: int) -> None:
        """From now on this process, and the engine's process above it, end when process `pid` does."""
        own = [os.getpid()] if os.getppid() == pid else [os.getppid(), os.getpid()]
        threading.Thread(target=_watch, args=(os.pidfd_open(pid), own), name="guard", daemon=True).start()


def _watch(process: int, own: list[int]) -> None:
    """`process`: a descriptor that becomes readable when its process has ended."""
    select.select([process], [], [])
    for pid in own:
        os.kill(pid, signal.SIGKILL)
