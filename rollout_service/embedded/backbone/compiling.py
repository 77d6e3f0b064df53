"""Compiles what a CPU computes faster without torch, beside the engine: no start waits for a compiler."""

import threading
import time
from collections.abc import Callable
from functools import cache

import structlog
import torch
from torch import Tensor

log = structlog.get_logger()


class Compiling:
    """The attention of `decode_kernel.py`, which a thread of its own compiles."""

    def __init__(self) -> None:
        self.attend: Callable[..., None] | None = None  # as soon as it is there
        self._thread = threading.Thread(target=self._compile, name="compile", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def _compile(self) -> None:
        start = time.monotonic()
        try:
            from rollout_service.embedded.backbone import decode_kernel  # here: it compiles
        except (ImportError, RuntimeError) as error:
            log.warning("attention_not_compiled", reason=str(error))  # torch computes it then, slower
            return
        self.attend = decode_kernel.attend
        log.info("attention_compiled", seconds=round(time.monotonic() - start, 1))


@cache
def compiling() -> Compiling:
    """Begins to compile, once a process."""
    return Compiling()


def quick_attend(like: Tensor, *, exact: bool) -> Callable[[], Callable[..., None] | None]:
    """Returns what to ask before each step for compiled attention: there is none in deterministic mode, on a GPU, in other numbers
    than float32, nor until it is compiled.
    """
    if exact or like.device.type != "cpu" or like.dtype != torch.float32:
        return lambda: None
    found = compiling()
    return lambda: found.attend
