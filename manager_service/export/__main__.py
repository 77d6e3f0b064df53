"""Starts the exporter. Wiring only."""

import asyncio
import importlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import get_args

import structlog

from common.bus.bus import Bus
from common.bus.redis_connection import make_client
from common.bus.streams import Cell
from common.cancellation import running
from common.outgoing import Caller
from common.store.known_store import recognised_by_service
from common.store.objects import Objects, patiently
from common.worker.service import heartbeat, run_with
from manager_service.export.cells import JobCell
from manager_service.export.exporter import Exporter
from manager_service.export.lease import Lease
from manager_service.export.passes import Passes
from manager_service.export.webhooks import Webhooks
from manager_service.records.archive import Archive
from manager_service.records.keys import GLOBAL
from manager_service.records.receivers import LoggerName, Receivers
from manager_service.settings import ManagerSettings

log = structlog.get_logger()
PASSES = Passes()
FOLDER = "loggers"
"""The folder, below that of the data, of what loggers keep on this machine, by tenant."""
LOOK_EVERY_S = 5.0
"""Time between two looks at which loggers are installed."""


async def main(settings: ManagerSettings, passes: Passes = PASSES, loggers: Sequence[LoggerName] | None = None) -> None:
    """`loggers`: those that it can write to; None: those whose packages are installed."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with heartbeat(settings.heartbeat_file), running(export(settings, passes, loggers)):
        await stop.wait()


async def export(settings: ManagerSettings, passes: Passes, loggers: Sequence[LoggerName] | None) -> None:
    """Works whenever no other exporter does, until cancelled."""
    folder = settings.data_dir.resolve() / FOLDER
    await recognised_by_service(settings, list(settings.models))
    objects = Objects.open(settings.store)
    await patiently(objects.probe)
    redis = make_client(settings.redis_url, GLOBAL, socket_connect_timeout=5, socket_timeout=None)
    cells = [
        JobCell(Bus.connect(settings.redis_url, Cell(name), objects), Archive(objects, name))
        for name in settings.models
    ]
    receivers, caller = Receivers(redis), Caller(settings.webhook_hosts, proxy=settings.export_proxy)
    servers = Caller(settings.logger_hosts, proxy=settings.export_proxy)
    exporter = Exporter(
        cells,
        receivers,
        folder=folder,
        passes=replace(passes, proxy=settings.export_proxy),
        servers=servers,
        every_s=settings.export_every_s,
        processes=settings.export_processes,
        disk_bytes=settings.max_logger_bytes,
        limits=settings.limits,
    )
    webhooks = Webhooks(cells, receivers, caller, give_up_s=settings.webhook_give_up_s, limits=settings.limits)

    try:
        log.info("exporter_starts")
        lease = Lease(redis, cells[0].bus, settings.lease_s)
        look = installed if loggers is None else lambda: loggers
        await lease.work(lambda: running(tell_loggers(receivers, cells[0].bus, look), exporter.run(), webhooks.run()))
    finally:
        await caller.close()
        await servers.close()


async def tell_loggers(receivers: Receivers, bus: Bus, look: Callable[[], Sequence[LoggerName]]) -> None:
    """Tells the managers which loggers there are, whenever that changes, until cancelled."""
    before: Sequence[LoggerName] | None = None
    while True:
        loggers = look()
        if loggers != before:
            await bus.retrying(lambda loggers=loggers: receivers.tell_installed(loggers))
            log.info("loggers", installed=loggers)
        before = loggers
        await asyncio.sleep(LOOK_EVERY_S)


def installed() -> list[LoggerName]:
    """The loggers whose packages are here, also those that were installed a moment ago."""
    importlib.invalidate_caches()
    return [name for name in get_args(LoggerName) if find_spec(name)]


if __name__ == "__main__":
    run_with("exporter", ManagerSettings, main)
