"""Ends vLLM's processes with the rollout worker that started them. vLLM's worker processes mix this class in.

Otherwise they outlive a rollout worker killed with SIGKILL, and keep the device's memory.
"""

import os
import select
import signal
import threading


class Guard:
    """vLLM's `worker_extension_cls`."""

    def end_with(self, pid: int) -> None:
        """Makes this process, and the engine's process above it, end when process `pid` does."""
        own = [os.getpid()] if os.getppid() == pid else [os.getppid(), os.getpid()]
        threading.Thread(target=_watch, args=(os.pidfd_open(pid), own), name="guard", daemon=True).start()


def _watch(process: int, own: list[int]) -> None:
    """Kills `own` when `process` ends: a descriptor that becomes readable then."""
    select.select([process], [], [])
    for pid in own:
        os.kill(pid, signal.SIGKILL)
