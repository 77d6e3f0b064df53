"""Starts one manager: the HTTP API, and an owner for each base model's cell."""

import asyncio
import signal
import sys

import structlog

from common.cancellation import done_before, running
from common.store.known_store import recognised_at_once, recognised_by_service
from common.worker.service import run_with, spare_collections
from manager_service.http.context import Api, Base
from manager_service.http.server import keep_keys, make_api, serve
from manager_service.http.tinker.parts import make_records
from manager_service.owner.owner import Owner
from manager_service.owner.surroundings import PoolSizer
from manager_service.settings import ManagerSettings

log = structlog.get_logger()
SWITCH_S = 0.0005
"""Seconds after which a thread that computes for one tenant lets the event loop go on, which serves all; Python's own are ten times as
many, and a request waits for its turn about ten times."""


async def main(settings: ManagerSettings) -> None:
    sys.setswitchinterval(SWITCH_S)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log.info("manager_starts", policy=settings.policy)
    names, is_known = list(settings.models), False

    async def recognise() -> None:
        nonlocal is_known
        is_known = await recognised_at_once(settings, names)

    if not await done_before(stop, recognise()):
        return
    async with make_api(settings) as api:
        if not (is_known or await done_before(stop, recognised_by_service(settings, names, api.objects))):
            return
        bases, tinker = api.bases.values(), make_records(api)
        owners = [make_owner(api, base).run(stop) for base in bases]
        async with running(*owners, *(base.run() for base in bases), tinker.run(), keep_keys(api)) as tasks:
            spare_collections()
            await serve(api, tinker, stop)
            stop.set()
            await asyncio.wait(tasks[: len(owners)])


def make_owner(api: Api, base: Base) -> Owner:
    settings = api.settings
    return Owner(
        bus=base.bus,
        cluster=base.cluster,
        store=api.adapters,
        objects=api.objects,
        tenants=api.tenants,
        stored=api.stored,
        lease_s=settings.lease_s,
        policy=settings.scheduling,
        archive_after_s=settings.archive_after_s,
        limits=settings.limits,
        pool=PoolSizer(base.bus, base.cluster, settings.bounds, repack=settings.repack),
    )


if __name__ == "__main__":
    run_with("manager", ManagerSettings, main)
