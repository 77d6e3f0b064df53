"""Devices by name, checked before anything is loaded onto them; and the clock of a thread that computes on one."""

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


def compute_clock(device: torch.device) -> Callable[[], float]:
    """Seconds of a computing thread: on a processor, without waiting for a core; on a GPU, of the clock."""
    return time.thread_time if device.type == "cpu" else time.perf_counter
