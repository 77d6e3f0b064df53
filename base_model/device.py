"""Finds a device by name, prepares a processor's threads and memory, and measures the time of a computing thread."""

import ctypes
import time
from collections.abc import Callable

import torch

from common.errors import InvalidInput


def find_device(name: str, setting: str) -> torch.device:
    """Finds a device. Raises InvalidInput, naming the setting, if torch does not know it or does not find it on this machine."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"{setting}={name}: torch finds no such device here ({reason})") from error


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""From glibc's malloc.h."""
KEPT_BYTES = 1 << 30
_C = ctypes.CDLL(None)


def prepare_cpu(num_threads: int) -> None:
    """Sets the threads, and lets the process keep freed memory for its next tensors, until `give_back_memory`. Call it first.

    glibc gives large blocks back at once and asks for them again in the next forward, page by page, which takes a
    tenth of the processor time of a training step. With another C library, or one older than 2.35, nothing changes.
    """
    torch.set_num_threads(num_threads)
    mallopt = getattr(_C, "mallopt", None)
    if mallopt is not None and mallopt(M_MMAP_THRESHOLD, KEPT_BYTES):
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_ARENA_MAX, 1)


def give_back_memory() -> None:
    """Gives free memory back to the system. Call it when there is nothing to compute."""
    trim = getattr(_C, "malloc_trim", None)
    if trim is not None:
        trim(0)


def compute_clock(device: torch.device) -> Callable[[], float]:
    """A clock of a computing thread's seconds: on a processor, without waiting for a core; on a GPU, of the clock."""
    return time.thread_time if device.type == "cpu" else time.perf_counter
