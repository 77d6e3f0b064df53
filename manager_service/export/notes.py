"""Writes warnings into jobs' events: by way of the owner that holds the job, else into its record or the archive."""

import asyncio
import time
from typing import Any

from common.bus.streams import partition_of
from common.errors import Unavailable
from common.wire.messages import JobCommand
from manager_service.export.cells import FoundJob, JobCell
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.journal import Journal
from manager_service.records.job_records import MOVING
from manager_service.records.keys import JSON
from manager_service.records.sample_records import EventRecord, Limits

# KEYS: job, its events. ARGV: the field `moving`, old state, new state, the event's entry and record.
# The first write needs no memory, which Redis may be out of.
WARN = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 'moving' end
if redis.call('HGET', KEYS[1], 'state') ~= ARGV[2] then return 'changed' end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('XADD', KEYS[2], ARGV[4], 'event', ARGV[5])
redis.call('HSET', KEYS[1], 'state', ARGV[3])
return 'done'
"""
AGAIN_S = 0.5
TRIES = 6
"""A job that is being archived is looked at again."""


async def warn(cell: JobCell, tenant: str, job: str, text: str, limits: Limits) -> None:
    """Writes one event, unless the job is gone. Raises Unavailable, to be called again, while it is being archived."""
    for _ in range(TRIES):
        found = await cell.job(tenant, job)
        if found is None:
            return
        if found.archived is not None:
            await cell.archive.add_event(
                found.archived, lambda number: EventRecord(number, int(time.time()), "warn", text)
            )
            return
        partition = partition_of(tenant)
        active = cell.bus.cell.active(partition)
        if await cell.bus.retrying(lambda active=active: cell.bus.client.sismember(active, job)):
            name = f"{job}/warn/{found.state.num_events}"
            command = JobCommand(id=name, tenant=tenant, job=job, partition=partition, action="warn", text=text)
            return await cell.bus.publish([(cell.bus.cell.jobs(partition), command)])
        if await _warn(cell, found, text, limits) == b"done":
            return
        await asyncio.sleep(AGAIN_S)
    raise Unavailable(f"the records of {job} are being moved")


async def _warn(cell: JobCell, found: FoundJob, text: str, limits: Limits) -> bytes:
    """Writes into the record of a job that no owner holds any more."""
    spec, state, keys = found.spec, found.state, cell.bus.cell
    changes = Changes()
    Journal(spec, state, limits).warn(time.time(), text, changes)
    ((_, event),) = changes.events
    args: list[Any] = [MOVING, found.written, JSON.encode(state), f"{event.sequence}-0", JSON.encode(event)]
    script = cell.bus.client.register_script(WARN)
    involved = [keys.job(spec.id), keys.events(spec.id)]
    return await cell.bus.retrying(lambda: script(keys=involved, args=args))
