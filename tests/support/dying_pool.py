"""A worker of MARLAAS_TEST_SERVICE that kills itself in its switches, once at each point in POINTS; then it lives.

MARLAAS_TEST_DEATHS: a file with a line for each death so far.
"""

import importlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from common.pool.base_workers import BaseWorker, BaseWorkers
from common.pool.gate import Channel, Close, Open
from common.worker.service import run
from rollout_service.settings import RolloutSettings
from trainer_service.settings import TrainerSettings

POINTS = ("loading", "loaded", "closing", "closed", "opened")


def die(point: str, deaths: Path) -> None:
    """Does nothing unless it is this point's turn."""
    died = deaths.read_text().split() if deaths.exists() else []
    if [*died, point] == list(POINTS[: len(died) + 1]):
        with deaths.open("a") as file:
            file.write(f"{point}\n")
        os.kill(os.getpid(), signal.SIGKILL)


def dying_after(method: Callable[..., Awaitable[Any]], point: str, deaths: Path) -> Callable[..., Awaitable[Any]]:
    async def dying(*arguments: Any) -> Any:
        found = await method(*arguments)
        die(point, deaths)
        return found

    return dying


def main(service: str, deaths: Path) -> None:
    plain_send: Any = Channel.send

    async def send(channel: Channel, message: Any) -> None:
        await plain_send(channel, message)
        if isinstance(message, Close | Open):
            die("closing" if isinstance(message, Close) else "opened", deaths)

    plain_follow: Any = BaseWorker.follow

    async def follow(worker: BaseWorker) -> None:
        die("loading", deaths)  # its process has just begun
        await plain_follow(worker)

    patched: Any = (BaseWorker, BaseWorkers, Channel)
    patched[0].follow, patched[2].send = follow, send
    patched[0].close = dying_after(BaseWorker.close, "closed", deaths)
    patched[1].load = dying_after(BaseWorkers.load, "loaded", deaths)
    module: Any = importlib.import_module(f"{service}_service.__main__")
    run(service, RolloutSettings if service == "rollout" else TrainerSettings, module.build, module.pooled)


if __name__ == "__main__":
    main(os.environ["MARLAAS_TEST_SERVICE"], Path(os.environ["MARLAAS_TEST_DEATHS"]))
