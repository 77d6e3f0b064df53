"""Compiles what a CPU computes faster without torch, in a thread next to the engine: no start waits."""

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

log = structlog.get_logger()


class Compiled(NamedTuple):
    """The functions of compiled_kernels.py."""

    attend: Callable[..., None]
    draw: Callable[..., None]
    rotate: Callable[..., None]


class Compiling:
    """Compiles in a thread of its own."""

    def __init__(self) -> None:
        self.found: Compiled | None = None  # as soon as it is there
        self._thread = threading.Thread(target=self._compile, name="compile", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def _compile(self) -> None:
        start = time.monotonic()
        try:
            from rollout_service.embedded.backbone import compiled_kernels as kernels  # here: it compiles
        except (ImportError, RuntimeError) as error:
            log.warning("attention_not_compiled", reason=str(error))  # torch computes it then, slower
            return
        self.found = Compiled(kernels.attend, kernels.draw, kernels.rotate)
        log.info("attention_compiled", seconds=round(time.monotonic() - start, 1))


@cache
def compiling() -> Compiling:
    """Begins to compile, once a process."""
    return Compiling()


def compiled_for(like: Tensor, *, exact: bool) -> Callable[[], Compiled | None]:
    """Returns a function that gives, before each step, what is compiled: nothing in deterministic mode, on a GPU, in other dtypes
    than float32, nor before it is there."""
    if exact or like.device.type != "cpu" or like.dtype != torch.float32:
        return lambda: None
    compiled = compiling()
    return lambda: compiled.found
