"""Lets the workers of one machine load to a GPU one after the other: while one measures what is left of its memory, nobody takes any."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import torch


@contextlib.contextmanager
def alone_on(device: str, number: int = 1) -> Generator[None]:
    """Waits until no other worker of this user loads to these GPUs, or measures them. `number`: of them, from that device on. A device
    that is no GPU, or not there, is nobody's."""
    with contextlib.ExitStack() as held:
        for name in sorted(
            _names(device, number)
        ):  # in one order for all, so that nobody waits for one that waits for it
            held.enter_context(locked(name))
        yield


@contextlib.contextmanager
def locked(name: str) -> Generator[None]:
    """Waits until no other process of this user is in a block of that name on this machine."""
    file = Path(tempfile.gettempdir()) / f"marlaas-{os.getuid()}-{name}.lock"
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _names(device: str, number: int) -> list[str]:
    """Names that a GPU has in every process, whichever of them it sees."""
    kind, _, first = device.partition(":")
    if kind != "cuda" or not (first or "0").isdecimal() or not torch.cuda.is_available():
        return []
    wanted = range(int(first or 0), int(first or 0) + number)
    there = range(torch.cuda.device_count())
    return [str(torch.cuda.get_device_properties(each).uuid) for each in wanted if each in there]
