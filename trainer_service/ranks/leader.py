"""The first rank of a trainer: starts and commands the others, and ends this process if one of them ends or hangs.

waits for: the other ranks, in each operation of the group   unblocked by: them, or by an end of the patience
after a crash: the whole trainer starts again; its messages are delivered again, to it or to another
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog
import torch

from base_model.device import find_device
from common.children.helpers import LENGTH_BYTES
from common.errors import InvalidInput
from common.worker.service import leave
from trainer_service.backbone.device_kernels.kernel_choice import refuse_kernels
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.ranks import commands
from trainer_service.ranks.commands import RankCommand
from trainer_service.ranks.group import Begin, RankGroup, open_store
from trainer_service.settings import TrainerSettings

log = structlog.get_logger()
PATIENCE_S = 300.0
"""Seconds that a rank may keep the others waiting: longer than a layer takes."""
LOOK_S, LOOK_EVERY_S = 1.0, 0.02
"""After a failed operation, how long to look for the rank that ended."""


@dataclass(slots=True)
class Ranks:
    """The other ranks, as the first one sees them. One call at a time."""

    group: RankGroup
    processes: Sequence["subprocess.Popen[bytes]"]
    bytes_held: Sequence[int] = ()
    """Bytes of the base model, on each rank, between two passes."""
    tokens: list[int] = field(default_factory=list[int])
    """Tokens of each rank in all passes, for which a backward is a part of its forward's."""
    busy_s: float = 0.0
    """Seconds in passes."""
    _num_stacks: int = 0
    _closing: bool = False
    _ending: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, begin: Begin) -> tuple["Ranks", ModulesBackbone]:
        """Starts the others and loads this rank's part; returns once all have theirs. `begin`: of the first rank. Raises
        InvalidInput for a base model that cannot be computed as it is meant."""
        store, port = open_store()
        others = [msgspec.structs.replace(begin, rank=rank, port=port) for rank in range(1, begin.num_ranks)]
        processes = [_spawned(each) for each in others]
        ranks = cls(RankGroup(begin, store), processes, tokens=[0] * begin.num_ranks)
        for process in processes:
            threading.Thread(target=ranks._watch, args=(process,), daemon=True).start()
        with ranks.in_step():
            ranks.group.join()
        part = ranks.group.load()
        with ranks.in_step():
            ranks.bytes_held = ranks.group.loaded()
        log.info("ranks_started", pids=[process.pid for process in processes], bytes_held=ranks.bytes_held)
        return ranks, part

    def close(self) -> None:
        """Ends the others."""
        self._closing = True
        for process in self.processes:
            process.communicate()
        self.group.leave()

    def tell(self, command: RankCommand) -> None:
        """Says a command to all others."""
        data = commands.encode(command)
        for process in self.processes:
            assert process.stdin
            process.stdin.write(len(data).to_bytes(LENGTH_BYTES))
            process.stdin.flush()
        self.group.say(data)

    def new_stack(self) -> int:
        self._num_stacks += 1
        return self._num_stacks

    @contextlib.contextmanager
    def in_step(self) -> Generator[None]:
        """Ends this process if a collective operation fails here: nobody knows where the others are."""
        try:
            yield
        except Exception as error:
            self._end(f"the ranks are out of step: {type(error).__name__}: {str(error).partition(chr(10))[0]}")

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        """Counts the time of a pass."""
        since = time.perf_counter()
        with self.in_step():
            yield
        self.busy_s += time.perf_counter() - since

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        if not self._closing:
            self._end("")

    def _end(self, reason: str) -> NoReturn:
        """Ends this process, with one line. The others end with it."""
        self._ending.acquire()  # for good: the first to come has the word
        leave(f"trainer: {self._ended() or reason}; the trainer ends, and its work is delivered again", 1)

    def _ended(self) -> str:
        """Tells which of the others has ended: one that a signal ended, for its end ends others too."""
        until = time.monotonic() + LOOK_S
        while time.monotonic() < until:
            known = [(process.poll(), rank) for rank, process in enumerate(self.processes, 1)]
            if ended := [(status, rank) for status, rank in known if status is not None]:
                status, rank = min(ended)
                return f"rank {rank} ended with status {status}"
            time.sleep(LOOK_EVERY_S)
        return ""


def _spawned(begin: Begin) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "trainer_service.ranks", msgspec.json.encode(begin).decode()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=_environment())


def _environment() -> dict[str, str]:
    """This process's variables, for it and the others: gloo takes the interface only from there."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def begin_of(settings: TrainerSettings, folder: Path) -> Begin:
    """The parts with which the first rank begins. Raises InvalidInput for settings that ranks cannot use."""
    name, num_ranks = settings.trainer_device, settings.trainer_ranks
    if settings.trainer_backbone == "decoder" or "compile" in settings.kernels:
        raise InvalidInput(
            "trainer_ranks above 1 needs trainer_backbone=transformers (or auto), and no trainer_kernels=compile"
        )
    if name not in ("cpu", "cuda"):
        raise InvalidInput(
            f"trainer_ranks={num_ranks} needs trainer_device=cpu or cuda, of which each rank takes its own"
        )
    device = find_device(name, "MARLAAS_TRAINER_DEVICE")
    if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise InvalidInput(f"trainer_ranks={num_ranks}, but torch finds {torch.cuda.device_count()} CUDA devices here")
    refuse_kernels(settings.kernels, device, getattr(torch, settings.dtype))
    return Begin(
        rank=0,
        num_ranks=num_ranks,
        port=0,
        folder=str(folder),
        device=name,
        dtype=settings.dtype,
        kernels=settings.kernels,
        max_context=settings.max_context,
        threads=settings.trainer_threads,
        parent=os.getpid(),
        patience_s=PATIENCE_S,
    )
