"""Starts the exporter. Wiring only."""

import asyncio
import fcntl
import importlib.util
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args

import structlog

from common.bus import Bus
from common.objects import Objects, patiently
from common.outgoing import AllowedHosts, Caller
from common.redis_connection import make_client
from common.service import heartbeat, run_with
from common.streams import Cell
from common.tasks import running
from manager_service.archive.store import Archive
from manager_service.export.cells import JobCell
from manager_service.export.exporter import Exporter
from manager_service.export.passes import Passes
from manager_service.export.webhooks import Webhooks
from manager_service.receivers import Receivers
from manager_service.records import GLOBAL, LoggerName
from manager_service.settings import ManagerSettings

log = structlog.get_logger()
PASSES = Passes()
FOLDER = "loggers"
"""In the data folder: what loggers keep on this machine, by tenant."""


async def main(settings: ManagerSettings, passes: Passes = PASSES, loggers: Sequence[LoggerName] | None = None) -> None:
    """`loggers`: those that it can write to; None: those whose packages are installed."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    folder = settings.data_dir.resolve() / FOLDER
    async with heartbeat(settings.heartbeat_file), alone_in(folder, stop):
        objects = Objects.open(settings.store)
        await patiently(objects.probe)
        redis = make_client(settings.redis_url, GLOBAL, socket_connect_timeout=5, socket_timeout=None)
        cells = [
            JobCell(Bus.connect(settings.redis_url, Cell(name), objects), Archive(objects, name))
            for name in settings.models
        ]
        receivers, caller = Receivers(redis), Caller(settings.webhook_hosts)
        installed = (
            [name for name in get_args(LoggerName) if importlib.util.find_spec(name)] if loggers is None else loggers
        )
        await cells[0].bus.retrying(lambda: receivers.tell_installed(installed))
        exporter = Exporter(
            cells,
            receivers,
            folder=folder,
            passes=passes,
            hosts=AllowedHosts(settings.logger_hosts),
            every_s=settings.export_every_s,
            processes=settings.export_processes,
            limits=settings.limits,
        )
        webhooks = Webhooks(cells, receivers, caller, give_up_s=settings.webhook_give_up_s, limits=settings.limits)
        log.info("exporter_starts", loggers=installed)
        async with running(exporter.run(), webhooks.run()):
            await stop.wait()
        await caller.close()


@asynccontextmanager
async def alone_in(folder: Path, stop: asyncio.Event) -> AsyncGenerator[None]:
    """Holds the folder's lock while the block runs, and waits for it: two exporters would write rows twice. The kernel drops it
    with the process."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        told = False
        while not stop.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    log.info("another_exporter_runs", folder=str(folder))
                told = True
                await asyncio.sleep(1.0)
        yield


if __name__ == "__main__":
    run_with("exporter", ManagerSettings, main)
