"""Devices by name, checked before anything is loaded onto them; the clock of a thread that computes on one; a processor's
threads and memory."""

import ctypes
import time
from collections.abc import Callable

import torch

from common.errors import InvalidInput


def find_device(name: str, setting: str) -> torch.device:
    """Raises InvalidInput, naming the setting, for what torch does not know or does not find on this machine."""
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
    """Call before any thread computes. Freed memory stays the process's, for its next tensors, until `give_back_memory`.

    glibc gives large blocks back at once and asks for them again in the next forward, page by page: of a training step that
    is a tenth of the processor time. With another C library, or one older than 2.35, nothing changes.
    """
    torch.set_num_threads(num_threads)
    mallopt = getattr(_C, "mallopt", None)
    if mallopt is not None and mallopt(M_MMAP_THRESHOLD, KEPT_BYTES):
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_ARENA_MAX, 1)


def give_back_memory() -> None:
    """What is free, for when there is nothing to compute."""
    trim = getattr(_C, "malloc_trim", None)
    if trim is not None:
        trim(0)


def compute_clock(device: torch.device) -> Callable[[], float]:
    """Seconds of a computing thread: on a processor, without waiting for a core; on a GPU, of the clock."""
    return time.thread_time if device.type == "cpu" else time.perf_counter
