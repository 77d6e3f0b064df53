"""A service whose pool worker has base workers that load at once and do what their base model's name says.

echoes    publishes each message in the cell's stream `env`
takes     does so after half a second
hangs     stops with the first message, event loop and all
dies      ends with status 3 while it loads
refuses   says that its settings are wrong

MARLAAS_TEST_ITEMSIZE: bytes of a weight, 4 unless set; 0: no weights, as env workers. With MARLAAS_TEST_UNUSED_S they hold none,
and end after so long without work.
"""

import asyncio
import os
import time
from typing import Any

from common.bus.bus import Out
from common.bus.streams import GROUP_ROLLOUT, Cell
from common.errors import InvalidInput
from common.pool import pool_worker
from common.pool.pool_worker import PooledService
from common.wire.messages import Failure, Message
from common.worker.handlers import Beat
from common.worker.service import BuiltService, Parts, run
from common.worker.telemetry import About
from common.worker.worker import Habits, Inbox
from rollout_service.settings import RolloutSettings

UNUSED_S = "MARLAAS_TEST_UNUSED_S"


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
    if settings.base_model == "refuses":
        raise InvalidInput("its licence is not accepted")
    if settings.base_model == "dies":
        os._exit(3)
    inbox = Inbox(parts.cell.rollout, GROUP_ROLLOUT)
    return BuiltService(Echoes(parts.cell), [inbox], About(slots=4), Habits())


def pooled(settings: RolloutSettings) -> PooledService:
    itemsize = 0 if UNUSED_S in os.environ else int(os.environ.get("MARLAAS_TEST_ITEMSIZE", "4"))
    return PooledService(About(slots=4), itemsize=itemsize)


if __name__ == "__main__":
    if UNUSED_S in os.environ:
        pool_worker.UNUSED_S = float(os.environ[UNUSED_S])
    run("rollout", RolloutSettings, build, pooled)
