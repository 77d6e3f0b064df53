"""A service whose pool worker has base workers that load at once and do what their base model's name says.

echoes    publishes each message in the cell's stream `env`
takes     does so after half a second
hangs     stops with the first message, event loop and all
dies      ends with status 3 while it loads
refuses   says that its settings are wrong
stalls    never loads
drowsy    cannot wake
greedy    ends with status 3 while it loads, as if by want of memory, where the process of another base model lives

MARLAAS_TEST_ITEMSIZE: bytes of a weight, 4 unless set; 0: no weights, as env workers. With MARLAAS_TEST_UNUSED_S they hold none,
and end after so long without work. MARLAAS_TEST_PATIENCE_S: others wait for one that loads, and it may hang, for so long.
"""

import asyncio
import contextlib
import fcntl
import math
import os
import time
from typing import IO, Any

import structlog

from common.bus.bus import Out
from common.bus.streams import GROUP_ROLLOUT, Cell
from common.errors import InvalidInput, Unavailable
from common.peers.convoys import Convoy
from common.pool import base_workers, pool_worker
from common.pool.gate import stay_awake
from common.pool.pool_worker import PooledService
from common.wire.messages import Failure, Message
from common.worker.handlers import Beat
from common.worker.service import BuiltService, Parts, run
from common.worker.telemetry import About
from common.worker.worker import Habits, Inbox
from rollout_service.settings import RolloutSettings

UNUSED_S, PATIENCE_S = "MARLAAS_TEST_UNUSED_S", "MARLAAS_TEST_PATIENCE_S"
LOCKED: list[IO[str]] = []


class Echoes:
    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    async def __call__(self, message: Message, beat: Beat) -> list[Out]:
        if self._cell.base_model == "hangs":
            time.sleep(600)
        await asyncio.sleep(0.5 if self._cell.base_model == "takes" else 0.01)
        return [(self._cell.env, message)]

    def hand_back(self, message: Any) -> list[Out] | None:
        return None

    def failed(self, message: Any, failure: Failure) -> list[Out]:
        return []


async def build(settings: RolloutSettings, parts: Parts) -> BuiltService:
    lock(settings, settings.base_model)
    if settings.base_model == "refuses":
        raise InvalidInput("its licence is not accepted")
    if settings.base_model == "dies" or (settings.base_model == "greedy" and has_others(settings)):
        os._exit(3)
    if settings.base_model == "stalls":
        await asyncio.Event().wait()
    inbox = Inbox(parts.cell.rollout, GROUP_ROLLOUT)
    wake = fail if settings.base_model == "drowsy" else stay_awake
    return BuiltService(Echoes(parts.cell), [inbox], About(slots=4), Habits(), wake=wake)


async def early(settings: RolloutSettings, parts: Parts, convoy: Convoy, stop: asyncio.Event) -> None:
    structlog.get_logger().info("serves_early", base_model=settings.base_model)


async def fail() -> None:
    raise Unavailable("no memory")


def has_others(settings: RolloutSettings) -> bool:
    """Do other base workers live? Each holds the lock of a file."""
    return not all(lock(settings, name) for name in settings.models if name != settings.base_model)


def lock(settings: RolloutSettings, base: str) -> bool:
    """False: another process holds the lock."""
    LOCKED.append((settings.data_dir / f"{base}.lock").open("w"))
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(LOCKED[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def pooled(settings: RolloutSettings) -> PooledService:
    itemsize = 0 if UNUSED_S in os.environ else int(os.environ.get("MARLAAS_TEST_ITEMSIZE", "4"))
    return PooledService(About(slots=4), itemsize=itemsize)


if __name__ == "__main__":
    if UNUSED_S in os.environ:
        pool_worker.UNUSED_S = float(os.environ[UNUSED_S])
    if PATIENCE_S in os.environ:
        pool_worker.PATIENCE = 0
        pool_worker.PATIENCE_S = base_workers.LOADING_S = float(os.environ[PATIENCE_S])
        base_workers.SLOW_BYTES_A_SECOND = math.inf
    run("rollout", RolloutSettings, build, pooled, early)
