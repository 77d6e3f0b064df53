"""Devices: finds one by name, measures its free memory, and lets a machine's workers load to a GPU in turn.

While one worker measures a GPU's free memory, no other may take any.
"""

import contextlib
import ctypes
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path

import torch

from common.errors import InvalidInput
from common.models.host_memory import host_bytes, own_bytes

CUDA_CONTEXT = 500 << 20
"""Bytes of a GPU that a process takes besides tensors; not measured."""


def find_device(name: str, setting: str) -> torch.device:
    """Finds a device. Raises InvalidInput, naming the setting, for one that torch or this machine lacks."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"{setting}={name}: torch finds no such device here ({reason})") from error


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that nobody uses now. Others may take them in the next moment."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_bytes()


def held_bytes(device: str) -> int:
    """Bytes of this process that count where it computes: on a GPU what torch has reserved there, and the context."""
    if not device.startswith("cuda") or not torch.cuda.is_initialized():
        return own_bytes()
    return CUDA_CONTEXT + torch.cuda.memory_reserved(device)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Options from glibc's malloc.h."""
KEPT_BYTES = 1 << 30
OUT_OF_MEMORY = ("DefaultCPUAllocator: ", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA out of memory", "[CUDA]: out of memory")
"""Out-of-memory errors that are raised as others: by the allocator on a processor, a CUDA library, torch's compiler, and Triton."""
_C = ctypes.CDLL(None)


def prepare_cpu(num_threads: int) -> None:
    """Sets the threads of torch, and keeps freed memory. Call it first: OpenMP's threads keep their number."""
    torch.set_num_threads(num_threads)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Lets the process keep freed memory for its next tensors, until `give_back_memory`; new threads share it.

    glibc returns large blocks at once and faults them in again, a tenth of a training step's processor time. Does
    nothing with another C library, or one older than 2.35.
    """
    mallopt = getattr(_C, "mallopt", None)
    if mallopt is not None and mallopt(M_MMAP_THRESHOLD, KEPT_BYTES):
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_ARENA_MAX, 1)


def give_back_memory() -> None:
    """Gives free memory back to the system, and to a GPU. Call it when there is nothing to compute."""
    trim = getattr(_C, "malloc_trim", None)
    if trim is not None:
        trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_out_of_memory(error: Exception) -> bool:
    """Does the error say that memory ran out?"""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in str(error) for words in OUT_OF_MEMORY
    )


def compute_clock(device: torch.device) -> Callable[[], float]:
    """A clock of computing seconds: on a processor, without waiting for a core; on a GPU, wall time."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


@contextlib.contextmanager
def alone_on(device: str, number: int = 1) -> Generator[None]:
    """Holds `number` GPUs from `device` on: no other worker of this user loads to them, or measures them, meanwhile."""
    with contextlib.ExitStack() as held:
        for name in sorted(_names(device, number)):  # in one order for all: nobody waits for one that waits for it
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
